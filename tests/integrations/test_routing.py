"""RoutingCallback: numbers and pictures of a training run, against a slow count."""

from collections import Counter

import pytest
import torch
from peft import LoraConfig
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

import moe_qlora
from moe_qlora.detection.routing import _count, expert_counts
from moe_qlora.errors import ConfigError
from moe_qlora.integrations.routing import RoutingCallback
from moe_qlora.testing import tiny_model
from tests.helpers import training

EXPERTS, TOP_K, TOKENS, STEPS = 4, 2, 12, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler and Trainer


class Board(TensorBoardCallback):
    """TensorBoard's callback on a writer that keeps what it gets."""

    def __init__(self):
        self.tb_writer, self._SummaryWriter = self, None
        self.logging_dir, self.seen = "", [Counter[int]() for _ in range(2)]
        self.scalars = {}
        self.slow = {}
        self.add_text = self.flush = self.close = lambda *_: None

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def add_image(self, name, image, step, dataformats):
        assert image.ndim == 3 and image.shape[2] == 3 and dataformats == "HWC"
        self.slow[step] = [count.copy() for count in self.seen]
        for count in self.seen:
            count.clear()


def trainer_of(model, out, board, rows=2 * STEPS):
    ids = torch.randint(5, 40, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=2,
        gradient_checkpointing=True, report_to=[], save_strategy="no", eval_strategy="steps",
        eval_steps=3, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:2], callbacks=[board])
    trainer.add_callback(RoutingCallback(trainer))
    return trainer


def trained(out, compiled):
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    base = training.packed("qwen3_moe", **sizes)
    torch.manual_seed(0)
    model = moe_qlora.get_peft_model(base, LoraConfig(r=2, target_modules=[]), experts=True)
    board = Board()
    if compiled:
        base.model.layers[0].compile(backend="aot_eager")
    for layer, count in zip(base.model.layers, board.seen, strict=True):

        def slow(gate, args, out, count=count):
            if gate.training and torch._C._current_graph_task_id() == -1:  # no recomputation
                count.update(out[-1].flatten().tolist())

        if not compiled:
            layer.mlp.gate.register_forward_hook(slow)
    trainer = trainer_of(model, out, board)
    trainer.train()
    experts = [module for name, module in base.named_modules() if name.endswith(".experts")]
    assert experts and not any(module._forward_pre_hooks for module in experts)
    return board, [row for row in trainer.state.log_history if any("routing" in k for k in row)]


def test_numbers_are_those_of_a_slow_count_also_of_a_compiled_layer(tmp_path, capsys):
    board, logs = trained(tmp_path, compiled=False)
    assert [row["step"] for row in logs] == [2, 4] == [*board.slow]
    each = 2 * 2 * TOKENS * TOP_K  # assignments of two steps of two rows
    for row in logs:
        for layer, count in enumerate(board.slow[row["step"]]):
            name = f"model.layers.{layer}.mlp.experts"
            assert sum(count.values()) == each
            share = max(count.values()) / each
            assert row[f"routing_share/{name}"] == pytest.approx(share)
            assert row[f"routing_idle/{name}"] == EXPERTS - len(count)
            logged = board.scalars[f"train/routing_share/{name}", row["step"]]
            assert logged == pytest.approx(share)
    assert "routing_share" not in capsys.readouterr().out  # the console stays short
    torch.compiler.reset()
    _, compiled = trained(tmp_path, compiled=True)
    for row, other in zip(logs, compiled, strict=True):
        numbers = {key: value for key, value in row.items() if "routing" in key}
        assert {key: other[key] for key in numbers} == pytest.approx(numbers)


def test_layers_without_hooks_and_models_without_experts_are_refused(tmp_path, monkeypatch):
    trainer = trainer_of(training.adapted(training.packed("qwen3_moe")), tmp_path, Board())
    monkeypatch.setattr("moe_qlora.detection.routing._count", lambda counts, ids: None)
    with pytest.raises(ConfigError, match="has counted no token: the layers were compiled"):
        trainer.train()
    dense = tiny_model("qwen3_moe", mlp_only_layers=[0, 1])
    with pytest.raises(ConfigError, match="has no fused experts behind a router"):
        trainer_of(dense, tmp_path, Board()).train()


def test_recomputed_forwards_count_once_and_ids_of_no_expert_apart():
    model = training.adapted(training.packed("qwen3_moe"))
    model.train().enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, top_k = torch.arange(24).view(2, 12), model.config.num_experts_per_tok
    with expert_counts(model, training=True) as counts:
        model(input_ids=ids).logits.sum().backward()
        model.eval()(input_ids=ids)
        assert {int(count.sum()) for count in counts.values()} == {ids.numel() * top_k}
        count = next(iter(counts.values())).zero_()
        _count(count, torch.tensor([[0, 3], [3, len(count) - 1], [-1, 1]]))
        assert count.tolist() == [1, 1, 0, 2, 2]
