"""Decoder layers as CUDA graphs: the same losses and gradients as without them."""

import copy
import logging
from typing import Any

import pytest
import torch
from graphed import COMPILED, batch, emulate, gradients, packed, recorded
from torch import Tensor

from moe_qlora.distributed import ranks
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from moe_qlora.train import flat_rows, graphs
from moe_qlora.train.graphs import LayerGraphs
from moe_qlora.train.layers import LayerRunner
from tests.helpers.fitting import ENOUGH, adapted, fitted, token_ids
from tests.helpers.small_models import fill
from tests.helpers.training import assert_same_training, whole_gradients

gpu = pytest.mark.gpu
emulated = pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
compiles = pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
each_level = pytest.mark.parametrize("level", [levels.RECOMPUTE, levels.KEEP])
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")
LAYERS = 2


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The levels of layers that ran without graphs, which are emulated."""
    emulate(monkeypatch)
    seen: list[str] = []
    compute = LayerRunner.compute

    def noting(self: Any, level: str, *args: Any, preserve_rng_state: bool = True) -> Any:
        if preserve_rng_state and self.graphs is not None and not self.measured:
            seen.append(level)
        return compute(self, level, *args, preserve_rng_state=preserve_rng_state)

    monkeypatch.setattr(LayerRunner, "compute", noting)
    return seen


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that were recorded, by emulated graphs."""
    emulate(monkeypatch)
    calls: list[Any] = []
    init = graphs.RecordedCall.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        calls.append(self.layer)

    monkeypatch.setattr(graphs.RecordedCall, "__init__", noting)
    return calls


def small(**overrides: Any) -> Any:
    model = adapted("qwen3_moe", **{"num_hidden_layers": LAYERS, "num_experts": 2, **overrides})
    model.get_base_model().config.use_cache = False
    return model


@emulated
def test_flat_rows_are_recorded_for_few_lengths(ran, monkeypatch):
    """Of those that come often, and of the last few where these change; gradients stay the same."""
    model = tiny_model("qwen3_moe", num_hidden_layers=LAYERS, seed=0).train()
    counts = [500, 120, 120, 190, 60, 120, 190, 120, 120, 190, 500, 60, 120, 190, 500, 60]
    batches = {count: token_ids(model, 1, count) for count in counts}

    def step(ids: Tensor) -> Any:
        return gradients(model, ids, use_cache=False)

    wanted = {count: step(ids) for count, ids in batches.items()}
    (rows,) = flat_rows.flatten_rows(model, 1, 512, fixed=True)
    rows.lengths.pick = lambda n, _: (flat_rows.rounded(n), 16, n != 60)
    made = LayerGraphs(model)
    for count in counts:
        torch.testing.assert_close(step(batches[count]), wanted[count], rtol=1e-4, atol=1e-6)
    assert made.recorded == 3 * LAYERS
    assert len(ran) == (1 + counts.count(60)) * LAYERS  # The first step, and those of 60
    model.eval()(input_ids=batches[500])  # is not recorded
    model.train()
    monkeypatch.setattr(graphs, "_MOST", 4)
    for length in (576, 704):
        rows.longest = length
        step(token_ids(model, 1, length))
    assert made.recorded == 4 * LAYERS
    made.remove()
    rows.remove()
    assert made.recorded == 0 and "forward" not in vars(model.model.layers[0])


@emulated
def test_a_flat_row_that_memory_holds_alone_gets_that_of_the_graphs(ran):
    model = small(num_hidden_layers=1)
    rows, *_ = flat_rows.flatten_rows(model, 1, 2048, fixed=True)
    with fitted(model, ENOUGH) as fit:
        memory = int(fit.peak) + 4096
    made, found = LayerGraphs(model), []
    with fitted(model, memory):
        for count in (1000, 1000, 2000, 1000, 2000, 1000):
            gradients(model, token_ids(model, 1, count))
            found.append(made.recorded)
    assert found == [0, 1, 0, 1, 0, 1]
    made.remove()
    rows.remove()


@emulated
@pytest.mark.parametrize("change", ["adapter", "weight"])
def test_what_is_put_in_the_place_of_weights_is_read_and_trained(change, recordings):
    model = small()
    ids, config = token_ids(model), copy.deepcopy(model.peft_config["default"])
    norm = "base_model.model.model.layers.1.input_layernorm.weight"
    with recorded(model, levels.KEEP):
        # A copy has no graphs
        assert_same_training(gradients(copy.deepcopy(model), ids), gradients(model, ids))
        for _ in range(2):
            gradients(model, ids)
        if change == "adapter":  # Made again under its name
            for name, other in (("other", "default"), ("default", "other")):
                model.add_adapter(name, copy.deepcopy(config))
                model.set_adapter(name)
                model.delete_adapter(other)
            fill(model)
        else:
            state = {norm: model.state_dict()[norm] * 2}
            model.load_state_dict(state, strict=False, assign=True)
            model.get_parameter(norm).requires_grad_(False)
        got = [gradients(model, ids) for _ in range(3)]
    assert len(recordings) == 2 * LAYERS
    wanted = gradients(model, ids)
    for each in got:
        assert_same_training(each, wanted)


@emulated
def test_a_pass_before_the_backward_of_the_last_one_runs_without_graphs(ran):
    model = small()
    batches = [token_ids(model, seed=seed) for seed in range(4)]

    def losses(*each: Tensor) -> Any:
        model.zero_grad()
        torch.stack([model(input_ids=ids, labels=ids).loss for ids in each]).sum().backward()
        return whole_gradients(model)

    wanted = losses(*batches[:2]), losses(batches[2])
    with recorded(model, levels.KEEP) as made:
        losses(batches[3])
        for _ in range(3):
            ran.clear()
            torch.testing.assert_close(losses(*batches[:2]), wanted[0])
            assert ran == [levels.KEEP] * LAYERS and made.recorded == LAYERS
            torch.testing.assert_close(losses(batches[2]), wanted[1])
            model(input_ids=batches[3])  # No backward: no later step waits for one


def balanced(model: Any, ids: Tensor, asked: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss and router logits of one batch, and each trained weight's gradient."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, output_router_logits=asked)
    out.loss.backward()
    return [each.detach() for each in (out.loss, *(out.router_logits or ()))], whole_gradients(
        model
    )


@emulated
@pytest.mark.parametrize(
    ("model_type", "level"), [("qwen3_moe", levels.RECOMPUTE), ("gpt_oss", levels.KEEP)]
)
def test_router_logits_of_replays_have_gradients(monkeypatch, model_type, level):
    emulate(monkeypatch)
    model: Any = tiny_model(model_type).train()
    model.config.use_cache = False
    model.router_aux_loss_coef = 0.5  # Such that the loss is most of the routers' gradient
    steps = [(token_ids(model, 2, 12, seed), asked) for asked in (True, False) for seed in range(3)]
    wanted = [balanced(model, *each) for each in steps]
    with recorded(model, level) as made:
        for each, want in zip(steps, wanted, strict=True):
            got = balanced(model, *each)
            assert len(got[0]) == 1 + model.config.num_hidden_layers * each[1]
            torch.testing.assert_close(got, want)
        assert made.recorded == 2 * model.config.num_hidden_layers


@gpu
@compiles
@pytest.mark.parametrize(
    ("model_type", "level", "length", "compiled"),
    [
        *(
            (kind, level, 640, False)
            for kind in FAMILIES
            for level in (levels.RECOMPUTE, levels.KEEP)
        ),
        *(("qwen3_moe", level, 64, compiled) for level in levels.LEVELS for compiled in (0, 1)),
        *(("deepseek_v3", level, 64, True) for level in levels.LEVELS),
    ],
)
def test_replays_give_the_gradients_of_the_layer(model_type, level, length, compiled):
    # Routers that choose all experts: compiled in another way, they may choose other ones
    model = packed(model_type, {"num_experts_per_tok": 4} if compiled else None)
    batches = [batch(step, length) for step in range(5)]
    wanted = [gradients(model, ids) for ids in batches]
    with recorded(model, level, compiled=bool(compiled)) as made:
        for ids, want in zip(batches, wanted, strict=True):
            assert_same_training(gradients(model, ids), want, COMPILED if compiled else 0.02)
        assert made.recorded == model.config.num_hidden_layers
    assert_same_training(gradients(model, batches[4]), wanted[4], 0.02)
    assert made.recorded == 0
    assert "forward" not in vars(model.get_base_model().model.layers[0])


@gpu
def test_what_layers_keep_is_recorded_in_one_order_with_what_they_compute_again():
    """Layers of all levels, two lengths in turns, and a layer that is recorded late."""
    model = packed(config={"num_hidden_layers": 6})
    steps = [(0, 64), (1, 64), (2, 32), (3, 32), (4, 64), (5, 32), (6, 64)]
    wanted = [gradients(model, batch(*step)) for step in steps]
    order = [levels.KEEP, levels.RECOMPUTE, levels.PART, levels.KEEP, levels.ATTENTION]
    with recorded(model, [*order, levels.KEEP]) as made:
        for place, step in enumerate(steps):
            if place == 4:
                made._calls[4].known.clear()
            assert_same_training(gradients(model, batch(*step)), wanted[place], 0.02)
        for place, step in enumerate(steps):
            assert_same_training(gradients(model, batch(*step)), wanted[place], 0.02)
        assert made.recorded == 12
        for place in (0, 3):  # Their graphs write where the others keep tensors now
            made._runners[place].level = levels.PART
        for place, step in enumerate(steps):
            assert_same_training(gradients(model, batch(*step)), wanted[place], 0.02)
        # A forward whose loss is given up leaves nothing that a later step waits for.
        model(input_ids=batch(0), labels=batch(0))
        before = made.recorded
        assert_same_training(gradients(model, batch(0)), wanted[0], 0.02)
        assert made.recorded == before


@gpu
@each_level
def test_several_forwards_may_come_before_their_backwards(level):
    model = packed()
    wanted = [gradients(model, batch(step)) for step in (7, 8)]
    both = {n: wanted[0][1][n] + g for n, g in wanted[1][1].items()}
    with recorded(model, level):
        for step in range(3):
            gradients(model, batch(step))
        model.zero_grad()
        losses = [model(input_ids=batch(step), labels=batch(step)).loss for step in (7, 8)]
        sum(losses).backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_training((sum(losses).item(), got), (wanted[0][0] + wanted[1][0], both), 0.02)
        # Accumulated, one backward after the other; gradients that are kept stay as they are.
        kept = [(grad, grad.clone()) for grad in got.values()]
        model.zero_grad()
        for step in (7, 8):
            model(input_ids=batch(step), labels=batch(step)).loss.backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_training((sum(losses).item(), got), (wanted[0][0] + wanted[1][0], both), 0.02)
        assert all(torch.equal(*each) for each in kept)


@gpu
@each_level
def test_dropout_is_drawn_again_in_backward(level):
    model = packed(lora_dropout=0.5)
    ids = batch(0)

    def seeded() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(11)
        return gradients(model, ids)

    wanted = seeded()
    with recorded(model, level) as made:
        for _ in range(3):
            assert_same_training(seeded(), wanted, 0.02)
        assert made.recorded == model.config.num_hidden_layers
        torch.manual_seed(12)
        other = gradients(model, ids)
    assert other[0] != wanted[0]


@gpu
@each_level
def test_a_failed_recording_leaves_everything_as_before(caplog, level):
    model = packed()
    ids = batch(0)
    want = gradients(model, ids)
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    norm.forward = lambda x, own=norm.forward: own(x) + 0 * x.sum().item()  # waits for the GPU
    stream = torch.cuda.current_stream()
    with recorded(model, level) as made, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same_training(gradients(model, ids), want, 0.02)
        assert made.recorded == 0
    assert "recording it failed" in caplog.text
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device="cuda")
    del norm.forward
    with recorded(model, level) as made:
        for _ in range(3):
            assert_same_training(gradients(model, ids), want, 0.02)
        assert made.recorded == model.config.num_hidden_layers


@gpu
def test_a_hook_that_a_graph_would_skip_is_told(caplog):
    model, seen = packed(), []
    router = next(m for m in model.modules() if "Router" in type(m).__name__)
    router.register_forward_hook(lambda *_: seen.append(1))
    want = gradients(model, batch(0))
    seen.clear()
    with recorded(model, levels.KEEP) as made, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same_training(gradients(model, batch(0)), want, 0.02)
        assert made.recorded == model.config.num_hidden_layers - 1
        assert len(seen) == 3
    assert "has a hook of" in caplog.text


@emulated
def test_weights_that_fsdp_gathers_with_others_are_not_recorded(monkeypatch, ran, caplog):
    """They have other addresses in each step, where a graph would read."""
    model = small()
    monkeypatch.setattr(ranks, "FSDPModule", type(model.get_base_model()))
    with recorded(model, levels.KEEP) as made, caplog.at_level(logging.WARNING):
        for _ in range(3):
            gradients(model, token_ids(model))
    assert made.recorded == 0
    assert "FSDP does not gather it by itself" in caplog.text
