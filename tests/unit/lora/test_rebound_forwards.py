"""Forwards that other code binds to packed experts or PEFT's wrapper: LoRA counts, exactly once."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from small_models import IDS, build, close, fill, lora_config
from torch import Tensor, nn
from training import assert_same, results
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moe_qlora
from moe_qlora.errors import AdapterError
from moe_qlora.experts import forward
from moe_qlora.layout import unwrapped

EAGER = Qwen3MoeExperts.forward.__wrapped__  # transformers' loop over experts, which reads weights


def adapted(model: Any = None, dropout: float = 0.0) -> Any:
    config = lora_config(lora_dropout=dropout)
    return fill(moe_qlora.get_peft_model(model or build(), config)).train()


def outermost(model: nn.Module) -> list[Any]:
    """What stands in the model as its experts: PEFT's wrapper, or the experts themselves."""
    return [m for name, m in model.named_modules() if name.endswith(".experts")]


def innermost(model: nn.Module) -> list[Any]:
    return [unwrapped(module) for module in outermost(model)]


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    assert all(close(right[name], value, tolerance) for name, value in left.items())


def bind(module: Any) -> None:
    module.forward = MethodType(EAGER, module)


def hook(module: Any) -> None:
    add_hook_to_module(module, ModelHook())


@pytest.mark.parametrize(
    ("rebind", "where", "tolerance"),
    [
        (bind, innermost, 1e-5),
        (bind, None, 1e-5),
        (hook, outermost, 1e-12),
        (hook, None, 1e-12),
    ],
)
def test_lora_counts_once_for_two_adapters(rebind, tolerance, where):
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
    assert_close(results(expected), results(model), tolerance)


def test_dropout():
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
