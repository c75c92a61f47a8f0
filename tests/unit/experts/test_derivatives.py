"""A second derivative through packed experts is refused, eagerly and by the custom operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import QuantizationError
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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_of_the_backward_is_refused(compiled: bool) -> None:
    module, inputs = experts()
    call = torch.compile(module, backend="eager") if compiled else module
    # The gradient that comes in is a constant: torch's own decorator lets that through.
    with pytest.raises(QuantizationError, match="first derivatives only, and a second one was"):
        torch.autograd.grad(call(*inputs).sum(), inputs[0], create_graph=True)
    [grad] = torch.autograd.grad(call(*inputs).sum(), inputs[0])
    assert grad.isfinite().all()
