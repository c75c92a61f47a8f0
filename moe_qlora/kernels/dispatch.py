"""Which backend computes a projection: one place to ask, one to add to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import grouped, reference
from .reference import Grads, Needs, Rows, Term, Weight


def forward(
    x: Tensor,
    weight: Weight,
    rows: Rows,
    scale: Tensor | None,
    bias: Tensor | None,
    terms: Sequence[Term],
) -> Tensor:
    """`reference.forward`, by the fastest backend that fits."""
    backend = grouped if grouped.fits(x, weight, terms) else reference
    return backend.forward(x, weight, rows, scale, bias, terms)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Weight,
    rows: Rows,
    scale: Tensor | None,
    bias: Tensor | None,
    terms: Sequence[Term],
    needs: Needs,
) -> Grads:
    """`reference.backward`, by the fastest backend that fits."""
    backend = grouped if grouped.fits(x, weight, terms) else reference
    return backend.backward(grad, x, weight, rows, scale, bias, terms, needs)
