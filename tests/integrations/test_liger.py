"""Liger over packed experts, which keep this package's forward; and Liger's loss in one model.

Liger's kernels need CUDA. Here its function for MLPs is plain torch, the one for experts must not
be called, and norms, rotary embedding and loss stay what they are.
"""

import importlib
import sys

import datasets
import pytest
import torch
import torch.nn.functional as F
import trl
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.testing import model_class, requires_gpu, tiny_config, tiny_inputs, tiny_model
from moe_qlora.train.liger import apply_liger
from tests.helpers.plans import plan
from tests.helpers.training import (
    NF4,
    adapted,
    assert_same,
    assert_same_training,
    loaded,
    logged_losses,
    results,
)

pytest.importorskip("liger_kernel")

from liger_kernel.transformers import monkey_patch, swiglu

REPLACED = ("mixtral", "qwen3_moe", "hunyuan_v1_moe", "deepseek_v3")  # Liger has their experts
CPU = {
    "rope": False, "rms_norm": False, "layer_norm": False, "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}  # fmt: skip


class SiLUMul:
    @staticmethod
    def apply(gate, up, *multipliers):
        assert set(multipliers) <= {1.0}
        return F.silu(gate) * up


@pytest.fixture(autouse=True)
def liger(monkeypatch):
    """Liger with functions that run on a CPU; what it replaces is put back."""
    monkeypatch.setattr(swiglu, "LigerFusedMoEFunction", None)
    monkeypatch.setattr(swiglu, "LigerSiLUMulFunction", SiLUMul)
    modules = [importlib.import_module(model_class(name).__module__) for name in REPLACED]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        vars(module).update(names)


def build(model_type, way=None):
    """A packed model with LoRA, to which Liger was applied at some point; in training mode."""

    def apply(now, model):
        if now == way:
            monkey_patch._apply_liger_kernel_to_instance(model, **CPU)

    if way == "class":
        monkey_patch._apply_liger_kernel(model_type, **CPU)
    model = tiny_model(model_type)
    apply("instance", model)
    moe_qlora.quantize_experts(model, NF4)
    apply("packed", model)
    peft_model = adapted(model, "all-linear")
    apply("adapted", model)
    return peft_model.train()


# Every class of Liger's, applied last; one of them at every moment.
@pytest.mark.filterwarnings("ignore:stock PEFT rewrites the target_modules")
@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        *((model_type, "adapted") for model_type in REPLACED),
        *(("qwen3_moe", way) for way in ("class", "instance", "packed")),
    ],
)
def test_packed_experts_keep_their_forward(model_type, way):
    plain = results(build(model_type))
    assert any("experts" in name for name in plain)
    model = build(model_type, way)
    model.get_base_model().model(**tiny_inputs(model))  # Not by the forward that has hooks
    assert_same(plain, results(model))


@pytest.mark.usefixtures("trainable_linears", "quiet_loading")
@pytest.mark.filterwarnings("ignore")  # By TRL 1.14, and dill
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_trainer_with_the_switch(device, model_folder, tmp_path):
    """`use_liger_kernel=True`, twice in one process: the second model is of Liger's class."""
    on_cpu = device == "cpu"

    def losses(**switch):
        torch.manual_seed(0)
        args = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[],
            learning_rate=5e-3, logging_steps=1, save_strategy="no", use_cpu=on_cpu,
            disable_tqdm=True, gradient_checkpointing=True, **switch,
        )  # fmt: skip
        model = adapted(loaded(model_folder, device_map={"": device}), "all-linear")
        data = datasets.Dataset.from_list([{"text": f"one and {i} and more"} for i in range(4)])
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        trained = trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
        trained.train()
        return logged_losses(trained)

    plain = losses()
    for _ in range(2):
        kernels = CPU if on_cpu else {"cross_entropy": False}
        found = losses(use_liger_kernel=True, liger_kernel_config=kernels)
        # TRL 1.14 has plain losses in chunks
        assert found == pytest.approx(plain, rel=1e-6 if on_cpu else 2e-2)


def test_plans_in_the_same_process():
    config = tiny_config("qwen3_moe")
    before = plan(config, targets="experts")
    monkey_patch._apply_liger_kernel("qwen3_moe", **CPU)
    after = plan(config, targets="experts")
    assert (after.peak, after.notes) == (before.peak, before.notes)
    monkey_patch._apply_liger_kernel("qwen3_moe", **{**CPU, "rms_norm": True})
    with pytest.raises(ConfigError, match="plan before Liger is applied"):
        plan(config)


def batch(model):
    ids = tiny_inputs(model)["input_ids"]
    labels = ids.clone()
    labels[:, :1] = -100
    return {"input_ids": ids, "labels": labels}


@requires_gpu(1)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_loss_is_that_of_transformers(model_type):
    model = tiny_model(model_type).cuda().train()
    inputs = {name: value.cuda() for name, value in batch(model).items()}
    model.requires_grad_(False)
    weight = model.get_input_embeddings().weight.requires_grad_(True)

    def run():
        loss = model(**inputs).loss
        return loss.item(), {"embeddings": torch.autograd.grad(loss, weight)[0]}

    plain = run()
    with apply_liger(model):
        assert_same_training(run(), plain, 1e-3)


def test_chunks_are_larger_unless_the_call_says_and_nothing_is_left_behind(monkeypatch):
    """Liger's function needs a GPU: here it is asked."""
    model, asked = tiny_model("qwen3_moe").train(), []
    file = sys.modules[type(model).__module__]

    def everything():
        return {name: dict(vars(m)) for name, m in model.named_modules()}, dict(vars(file))

    def loss(**options):
        asked.append(options["chunk_mem_const"])
        return options["hidden_states"].sum()

    model(**batch(model))  # which sets some
    before = everything()
    with apply_liger(model):
        assert everything()[1] == before[1]  # Of the next model, too
        monkeypatch.setitem(model.forward.__func__.__globals__, "LigerForCausalLMLoss", loss)
        model(**batch(model))
        model(**batch(model), chunk_mem_const=1)
        model(input_ids=batch(model)["input_ids"])
    assert asked == [8, 1] and everything() == before


def with_adapter(model):
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    return get_peft_model(model, config).get_base_model()


def with_codes(model):
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)


def with_loss(model):
    model.loss_function = lambda *args, **kwargs: torch.tensor(42.0)


def failing(model):
    def fails(model, **_):
        model.forward = model.model.forward
        raise ImportError("cannot import name 'Gone'")

    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["qwen3_moe"] = fails


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("qwen3_moe", with_adapter, "the head has LoRA"),
        ("qwen3_moe", with_codes, "the head is quantized"),
        ("qwen3_moe", with_loss, "loss_function was set"),
        ("qwen3_moe", failing, "Liger fails on qwen3_moe .*Gone"),
        ("llama4_text", None, "replaces the forward of all llama4_text models"),
        ("glm4_moe", None, "Liger has no kernels for glm4_moe"),
    ],
)
def test_where_the_loss_stays_the_models(model_type, change, words, monkeypatch):
    of_types = dict(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN)
    monkeypatch.setattr(monkey_patch, "MODEL_TYPE_TO_APPLY_LIGER_FN", of_types)
    model = tiny_model(model_type)
    if change is not None:
        model = change(model) or model
    before = dict(vars(model)), vars(type(model))["forward"]
    with pytest.raises(ConfigError, match=words):
        apply_liger(model)
    assert (dict(vars(model)), vars(type(model))["forward"]) == before
