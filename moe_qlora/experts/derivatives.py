"""First derivatives only: whoever asks for a second one is told, instead of getting part of it.

`torch.autograd.function.once_differentiable` does not do: it lets a second derivative through as
none where the gradient that comes in needs no gradient itself, as that of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `backward` that autograd cannot differentiate: a second derivative raises."""

    @wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        # Autograd runs with gradients here exactly where it was asked for create_graph=True.
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            out = backward(ctx, *grads)
        return _guard(out)

    return guarded


def _guard(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _NoSecondOrder.apply(value.detach().requires_grad_())
    if isinstance(value, Sequence):
        return type(value)(map(_guard, value))  # type: ignore[call-arg]
    return value


class _NoSecondOrder(torch.autograd.Function):
    """Passes a gradient on, whose own derivative is not there."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise QuantizationError(
            "Packed experts have first derivatives only, and a second one was asked for "
            "(create_graph=True, as for a gradient penalty): keep the experts out of it, or train "
            "them unpacked."
        )
