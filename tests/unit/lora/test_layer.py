"""LoRA on packed experts: what it adds to any forward, its ranks, its dropout."""

from types import MethodType
from typing import Any

import pytest
import small_models
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from oracle import Oracle
from peft import LoraConfig
from small_models import IDS, close, decoded, fill
from torch import nn
from training import SETTINGS, assert_same, assert_same_training, packed, results
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_qlora
from moe_qlora.errors import AdapterError, ConfigError
from moe_qlora.experts import forward
from moe_qlora.layout import unwrapped
from moe_qlora.lora import layer

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def lora_config(**changes: Any) -> LoraConfig:
    return small_models.lora_config(**{"target_modules": [], **changes})


@pytest.mark.parametrize(
    ("model_type", "codec", "implementation", "targets"),
    [
        ("gpt_oss", "int8", "eager", BOTH),
        ("qwen3_moe", "nf4", "grouped_mm", BOTH[1:]),
        ("deepseek_v3", "nf4", "grouped_mm", BOTH),
        ("llama4_text", "nf4", None, BOTH[:1]),
        ("gpt_oss", "nf4", "moe_qlora", BOTH[1:]),
    ],
)
def test_adapters_add_up_and_merge_on_any_forward(model_type, codec, implementation, targets):
    """On every architecture: tests/registry/test_lora_families.py."""
    base = packed(model_type, SETTINGS[codec])
    if implementation:
        base.set_experts_implementation(implementation)
    oracle = Oracle(decoded(base), 1e-5)
    model = moe_qlora.get_peft_model(base, lora_config(target_parameters=targets))
    oracle.take(model, "default", 7 / 3)
    oracle.train(model, "default")
    model.add_adapter("two", lora_config(target_parameters=targets, r=2, lora_alpha=5))
    oracle.take(model, "two", 5 / 2)
    oracle.train(model, "two", "default")
    with model.disable_adapter():
        oracle.check(model)
    before = oracle.run(model)[0]
    model.merge_adapter(["two"])
    with pytest.warns(UserWarning, match="additionally merging default"):  # PEFT's own
        model.merge_adapter(["default"])
    oracle.check(model, "two", "default")
    model.unmerge_adapter()
    assert torch.equal(oracle.run(model)[0], before)


def expert_wrappers(model: nn.Module) -> list[Any]:
    """PEFT's wrappers of expert weights, layer by layer, the outer one first."""
    return [module for module in model.modules() if isinstance(module, layer.ParamWrapper)]


def test_patterns_ranks_and_initialization_follow_the_config():
    config = lora_config(
        r=4, use_rslora=True, init_lora_weights="gaussian",
        rank_pattern={r"experts\.down_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.experts\.gate_up_proj": 11},
    )  # fmt: skip
    down, _, _, up = expert_wrappers(moe_qlora.get_peft_model(packed(), config))
    assert down.lora_A["default"].weight.shape == (4 * 2, 40)
    assert down.lora_B["default"].weight.shape == (64, 2 * 4)
    assert down.scaling["default"] == pytest.approx(7 / 2**0.5)
    assert up.scaling["default"] == pytest.approx(11 / 2)
    assert up.lora_A["default"].weight.detach().std() == pytest.approx(1 / 4, rel=0.2)
    assert not up.lora_B["default"].weight.any()


def test_the_rank_of_experts_can_be_scaled():
    for fields, scale, expected in (
        ({}, True, {"q_proj": 8, "gate_up_proj": 4, "down_proj": 4}),  # two experts for each token
        ({"rank_pattern": {"down_proj": 5}}, 16, {"q_proj": 8, "gate_up_proj": 1, "down_proj": 5}),
    ):
        config = lora_config(r=8, target_modules=["q_proj"], **fields)
        model = moe_qlora.get_peft_model(packed(), config, scale_expert_rank=scale)
        ranks = {each.parameter_name: each.r["default"] for each in expert_wrappers(model)}
        attention = model.base_model.model.model.layers[0].self_attn.q_proj.r["default"]
        assert {"q_proj": attention, **ranks} == expected


def adapted(model: Any = None, dropout: float = 0.0) -> Any:
    config = lora_config(lora_dropout=dropout)
    return fill(moe_qlora.get_peft_model(model or packed(), config)).train()


def test_dropout_applies_in_training_only_and_only_where_it_can():
    exact, model = adapted()(input_ids=IDS).logits, adapted(dropout=0.5)
    assert torch.equal(model.eval()(input_ids=IDS).logits, exact)
    model.train()
    torch.manual_seed(3)
    first = model(input_ids=IDS).logits
    torch.manual_seed(3)
    assert torch.equal(model(input_ids=IDS).logits, first)
    assert not close(first, model(input_ids=IDS).logits) and not close(first, exact)
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(AdapterError, match="set_experts_implementation"):
        model(input_ids=IDS)
    # By the full name, before PEFT has put anything into the model.
    base = packed("llama4_text")
    match = r"lora_dropout=0\.5 does not work for model\.layers\.0\.\S+gate_up_proj of"
    with pytest.raises(ConfigError, match=match):
        adapted(base, 0.5)
    assert not expert_wrappers(base)


# Forwards that other code binds to packed experts, or to PEFT's wrapper.

EAGER = Qwen3MoeExperts.forward.__wrapped__  # transformers' loop over experts, which reads weights


def outermost(model: nn.Module) -> list[Any]:
    """What stands in the model as its experts: PEFT's wrapper, or the experts themselves."""
    return [m for name, m in model.named_modules() if name.endswith(".experts")]


def innermost(model: nn.Module) -> list[Any]:
    return [unwrapped(module) for module in outermost(model)]


def bind(module: Any) -> None:
    module.forward = MethodType(EAGER, module)


def hook(module: Any) -> None:
    add_hook_to_module(module, ModelHook())


@pytest.mark.parametrize(
    ("rebind", "where", "tolerance"),
    [(bind, innermost, 1e-5), (bind, None, 1e-5), (hook, outermost, 0.0), (hook, None, 0.0)],
)
def test_a_forward_that_is_bound_counts_lora_once(rebind, tolerance, where):
    """None: bound before PEFT wraps the experts."""
    expected, base = adapted(), packed()
    for module in outermost(base) if where is None else ():
        rebind(module)
    model = adapted(base)
    for each in (expected, model):
        each.add_adapter("second", lora_config(r=2))
        fill(each, seed=2)
        each.base_model.set_adapter(["default", "second"])
    for module in where(model) if where else ():
        rebind(module)
    assert_same_training((0, results(model)), (0, results(expected)), tolerance)


def test_hooks_take_dropout_and_leave_no_trace():
    model = adapted(dropout=0.5)
    expected, modules = results(model), [*innermost(model), *outermost(model)]
    for module in modules:
        hook(module)
    assert_same(expected, results(model))
    assert not any(forward.asks_for_lora(module) for module in innermost(model))
    for module in modules:
        remove_hook_from_module(module)
        assert "forward" not in module.__dict__
    assert all(forward.asks_for_lora(module) for module in innermost(model))
    assert_same(expected, results(model))


def test_a_forward_that_reads_weights_takes_no_dropout():
    model = adapted(dropout=0.5)
    for module in innermost(model):
        bind(module)
    with pytest.raises(AdapterError, match="is bound as the forward of these"):
        results(model)
    assert torch.isfinite(model.eval()(input_ids=IDS).logits).all()
    for module in outermost(model):  # Where it was not written for
        bind(module)
    with pytest.raises(AttributeError, match="act_fn"):
        results(model.train())
