"""LoRA on packed experts, against decoded weights with s B A added expert by expert."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any

import pytest
import small_models
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig
from small_models import IDS, build, close, decoded, fill, slow_delta
from torch import Tensor, nn
from torch.func import functional_call
from training import assert_same, assert_same_training, results
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_qlora
from moe_qlora.errors import AdapterError, ConfigError
from moe_qlora.experts import forward
from moe_qlora.layout import unwrapped
from moe_qlora.lora import layer

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def lora_config(**changes: Any) -> LoraConfig:
    return small_models.lora_config(**{"target_modules": [], **changes})


def expert_wrappers(model: nn.Module) -> dict[str, Any]:
    """PEFT's wrappers of expert weights, by the weight's name in the base model."""
    named = ((n, m) for n, m in model.named_modules() if isinstance(m, layer.ParamWrapper))
    return {
        f"{name.replace('.base_layer', '').removeprefix('base_model.model.')}.{m.parameter_name}": m
        for name, m in named
    }


def summed(twin: Any, model: Any, adapters: Sequence[str] = ("default",)) -> dict[str, Tensor]:
    """W + sum of s B A of each expert weight."""
    weights = {}
    for name, wrapper in expert_wrappers(model).items():
        weights[name] = twin.get_parameter(name).detach()
        for adapter in adapters:
            pair = (getattr(wrapper, part)[adapter].weight for part in ("lora_A", "lora_B"))
            weights[name] = weights[name] + slow_delta(wrapper, *pair, adapter)
    return weights


def reference(twin: Any, model: Any, *adapters: str) -> Tensor:
    """Logits of the sums; gradients are tests/registry/test_lora_families.py's."""
    weights = summed(twin, model, adapters or ("default",))
    return functional_call(twin, weights, kwargs={"input_ids": IDS}).logits


@pytest.mark.parametrize(
    ("model_type", "implementation", "targets"),
    [
        ("gpt_oss", "eager", BOTH),
        ("qwen3_moe", "grouped_mm", BOTH[1:]),
        ("deepseek_v3", "grouped_mm", BOTH),
        ("llama4_text", "moe_qlora", BOTH[:1]),
        ("gpt_oss", "moe_qlora", BOTH[1:]),
    ],
)
def test_gradients_of_stock_forwards_and_of_one_projection(model_type, implementation, targets):
    base = build(model_type, implementation)
    twin = decoded(base)
    model = fill(moe_qlora.get_peft_model(base, lora_config(target_parameters=targets)))
    factors = [p for name, p in model.named_parameters() if "lora_" in name]
    assert len(factors) == 2 * len(expert_wrappers(model)) > 0
    logits, other = model(input_ids=IDS).logits, reference(twin, model)
    assert close(logits, other)
    found = torch.autograd.grad(logits.square().sum(), factors)
    wanted = torch.autograd.grad(other.square().sum(), factors)
    assert all(map(close, found, wanted))


@pytest.mark.parametrize(
    ("model_type", "implementation"), [("gpt_oss", "moe_qlora"), ("qwen3_moe", "eager")]
)
def test_several_active_adapters_add_up(model_type, implementation):
    base = build(model_type, implementation)
    twin = decoded(base)
    model = moe_qlora.get_peft_model(base, lora_config())
    model.add_adapter("two", lora_config(r=2, lora_alpha=5, use_rslora=False))
    fill(model)
    plain = twin(input_ids=IDS).logits
    for active in (["two"], ["default", "two"]):
        model.base_model.set_adapter(active)
        assert close(model(input_ids=IDS).logits, reference(twin, model, *active))
        with model.disable_adapter():
            assert close(model(input_ids=IDS).logits, plain)


def test_patterns_ranks_and_initialization_follow_the_config():
    config = lora_config(
        r=4,
        use_rslora=True,
        init_lora_weights="gaussian",
        rank_pattern={r"experts\.down_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.experts\.gate_up_proj": 11},
    )
    model = moe_qlora.get_peft_model(build("qwen3_moe"), config)
    wrappers = expert_wrappers(model)
    down = wrappers["model.layers.0.mlp.experts.down_proj"]
    up = wrappers["model.layers.1.mlp.experts.gate_up_proj"]
    assert down.lora_A["default"].weight.shape == (5 * 2, 12)
    assert down.lora_B["default"].weight.shape == (24, 2 * 5)
    assert down.scaling["default"] == pytest.approx(7 / 2**0.5)
    assert up.scaling["default"] == pytest.approx(11 / 2)
    assert up.lora_A["default"].weight.detach().std() == pytest.approx(1 / 4, rel=0.2)
    assert not up.lora_B["default"].weight.any()


def test_the_rank_of_experts_can_be_scaled():
    config = lora_config(r=8, target_modules=["q_proj"])
    model = moe_qlora.get_peft_model(build("qwen3_moe"), config, scale_expert_rank=True)
    assert {wrapper.r["default"] for wrapper in expert_wrappers(model).values()} == {4}
    assert model.base_model.model.model.layers[0].self_attn.q_proj.r["default"] == 8
    config = lora_config(r=8, rank_pattern={"down_proj": 5})
    model = moe_qlora.get_peft_model(build("qwen3_moe"), config, scale_expert_rank=16)
    ranks = {name.rpartition(".")[2]: w.r["default"] for name, w in expert_wrappers(model).items()}
    assert ranks == {"gate_up_proj": 1, "down_proj": 5}


def test_dropout_applies_in_training_only_and_only_where_it_can():
    base = build("qwen3_moe")
    model = fill(moe_qlora.get_peft_model(base, lora_config(lora_dropout=0.5)).eval())
    exact = reference(decoded(copy.deepcopy(model).unload()), model)
    assert close(model(input_ids=IDS).logits, exact)
    model.train()
    torch.manual_seed(3)
    first = model(input_ids=IDS).logits
    torch.manual_seed(3)
    again = model(input_ids=IDS).logits
    other = model(input_ids=IDS).logits
    assert torch.equal(first, again) and not close(first, other) and not close(first, exact)
    base.set_experts_implementation("eager")
    with pytest.raises(AdapterError, match="set_experts_implementation"):
        model(input_ids=IDS)
    # By the full name, before PEFT has put anything into the model.
    base = build("llama4_text")
    match = r"lora_dropout=0\.5 does not work for model\.layers\.0\.\S+gate_up_proj of"
    with pytest.raises(ConfigError, match=match):
        moe_qlora.get_peft_model(base, lora_config(lora_dropout=0.5))
    assert not expert_wrappers(base)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("qwen3_moe", "nf4"), ("gpt_oss", "int8"), ("llama4_text", "nf4")]
)
def test_merging_gives_the_sum_and_unmerging_the_original(model_type, kind):
    base = build(model_type, kind=kind)
    twin = decoded(base)
    model = moe_qlora.get_peft_model(base, lora_config())
    model.add_adapter("two", lora_config(r=2))
    fill(model).base_model.set_adapter(["default", "two"])
    adapted = model(input_ids=IDS).logits
    model.merge_adapter(["two"])
    with pytest.warns(UserWarning, match="additionally merging default"):  # PEFT's own
        model.merge_adapter(["default"])
    wrappers = expert_wrappers(model)
    for name, expected in summed(twin, model, ("two", "default")).items():
        merged = getattr(wrappers[name].get_base_layer(), wrappers[name].parameter_name)
        assert isinstance(merged, nn.Parameter) and not merged.requires_grad
        assert close(merged, expected), name
    assert close(model(input_ids=IDS).logits, adapted)
    model.unmerge_adapter()
    assert torch.equal(model(input_ids=IDS).logits, adapted)


# Forwards that other code binds to packed experts, or to PEFT's wrapper.

EAGER = Qwen3MoeExperts.forward.__wrapped__  # transformers' loop over experts, which reads weights


def adapted(model: Any = None, dropout: float = 0.0) -> Any:
    config = lora_config(lora_dropout=dropout)
    return fill(moe_qlora.get_peft_model(model or build(), config)).train()


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
    expected, base = adapted(), build()
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


def test_dropout_under_a_forward_that_is_bound():
    expected = results(adapted(dropout=0.5))
    model = adapted(dropout=0.5)
    for module in innermost(model):
        hook(module)
    assert_same(expected, results(model))
    model = adapted(dropout=0.5)
    for module in innermost(model):
        bind(module)
    with pytest.raises(AdapterError, match="is bound as the forward of these"):
        results(model)
    assert torch.isfinite(model.eval()(input_ids=IDS).logits).all()
    for module in outermost(model):  # Where it was not written for
        bind(module)
    with pytest.raises(AttributeError, match="act_fn"):
        results(model)


def test_hooks_leave_no_trace():
    model = adapted()
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
