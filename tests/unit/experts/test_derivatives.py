"""A second derivative through packed experts is refused, eagerly and by the custom operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import QuantizationError
from moe_qlora.experts.projection import first_order
from moe_qlora.testing import tiny_model


def experts() -> tuple[Any, list[torch.Tensor]]:
    """An experts module and its inputs, of which the hidden states need gradients."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    module: Any = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    return module, [x.requires_grad_(), index, weights]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused(compiled: bool) -> None:
    module, inputs = experts()
    call = torch.compile(module, backend="eager") if compiled else module
    leaf = inputs[0]
    # The gradient that comes in is a constant: torch's own decorator lets that through.
    [grad] = torch.autograd.grad(call(*inputs).sum(), leaf, create_graph=True)
    [plain] = torch.autograd.grad(module(*inputs).sum(), leaf)
    torch.testing.assert_close(grad.detach(), plain)
    with pytest.raises(QuantizationError, match="first derivatives only, and a second one was"):
        (grad.square().sum() + leaf.sum()).backward()


def test_a_graph_that_is_not_used_does_no_harm() -> None:
    module, inputs = experts()
    inputs[0].grad = None
    loss = module(*inputs).square().sum()
    [grad] = torch.autograd.grad(loss, inputs[0], create_graph=True)
    (inputs[0].square().sum()).backward()
    assert grad.requires_grad and inputs[0].grad is not None


def test_gradients_in_lists_are_guarded_too() -> None:
    weight = torch.ones(2, requires_grad=True)

    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        return grad, None, [grad, None]

    first, none, (second, other) = backward(None, weight)
    assert none is other is None
    for grad in (first, second):
        with pytest.raises(QuantizationError):
            grad.sum().backward()
    with torch.no_grad():
        assert backward(None, weight)[0] is weight
