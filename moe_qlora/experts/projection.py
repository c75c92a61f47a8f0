"""One projection over packed experts as an operation with gradients, eager and compiled.

Eager calls go through a `torch.autograd.Function`. Under `torch.compile` the same computation is
one custom operator, opaque to the compiler, so that a loop whose length depends on the routing
neither breaks the graph nor is unrolled. Both compute by `kernels/projection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import QuantizationError
from ..kernels.projection import (
    GROUPED,
    LOOP,
    Decode,
    LoraInputs,
    Needs,
    Operands,
    Rows,
    Way,
    Weight,
)
from ..kernels.weights import PackedWeight
from ..packing.codec import unpack_range
from ..packing.parametrize import is_autocast_on
from .backend import runs_grouped
from .kept import keep, take
from .operands import PackedOperand


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `backward` that autograd cannot differentiate: a second derivative raises.

    `torch.autograd.function.once_differentiable` does not suffice: where the incoming gradient
    needs no gradient itself, as that of a loss, it lets a second derivative through as none.
    """

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
    """The identity on a gradient, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise QuantizationError(
            "Packed experts have first derivatives only, and a second one was asked for "
            "(create_graph=True, as for a gradient penalty): keep the experts out of it, or train "
            "them unpacked. What prepare_training sets has first derivatives only too."
        )


class Inputs(NamedTuple):
    """Tensors of one projection; R sorted rows, E experts."""

    x: Tensor  # `(N, in)`
    scale: Tensor | None  # `(R,)` factors of the rows, or None
    bias: Tensor | None  # `(E, out)`, or None
    order: Tensor  # `(R,)`: the assignment (token x k + slot) of each sorted row
    expert_offsets: Tensor  # `(E + 1,)` offsets of the experts' rows
    dropped: Sequence[Tensor | None]  # For each adapter x after its dropout, None for x itself
    a: Sequence[Tensor]  # `(E r, in)` for each adapter
    b: Sequence[Tensor]  # `(out, r E)` for each adapter


class Projection(NamedTuple):
    """The constants of one call of one projection."""

    transposed: bool  # Whether the weight is stored `(E, in, out)`
    top_k: int  # k, assignments of a token
    gathers: bool  # Whether x are tokens `(T, in)`, else sorted rows `(R, in)`
    scatters: bool  # Whether the result is summed to tokens `(T, out)`, else rows `(R, out)`
    scalings: tuple[float, ...]  # One factor for each adapter
    autocast: torch.dtype | None  # None outside autocast

    def plain(self, weight: Tensor, inputs: Inputs) -> Tensor:
        """Compute it with an unpacked weight by ordinary autograd, which gives its gradient too."""
        dtype = self.autocast or inputs.x.dtype
        return LOOP.forward(
            self._operands(inputs, weight.shape, dtype, lambda i, j: weight[i:j].to(dtype))
        )

    def packed(self, weight: PackedWeight | PackedOperand, inputs: Inputs) -> Tensor:
        """Compute it from packed codes; these get no gradient."""
        if isinstance(weight, PackedOperand):
            return self._compiled(weight, inputs)
        flat = (inputs.x, inputs.scale, inputs.bias, *inputs.dropped, *inputs.a, *inputs.b)
        routing = (inputs.order, inputs.expert_offsets)
        return cast(Tensor, _PackedProjection.apply(self, weight, routing, len(inputs.a), *flat))

    def run(self, packed: PackedWeight, inputs: Inputs) -> Tensor:
        """Compute the forward alone."""
        with torch.no_grad(), no_autocast(inputs.x):
            way, operands = self._on_codes(packed, inputs)
            return way.forward(operands)

    def run_backward(
        self, packed: PackedWeight, inputs: Inputs, grad: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return gradients in the order x, scale, bias, dropped, a, b; None where not needed."""
        n = len(inputs.a)
        parts = [list(needs[3 + i * n : 3 + (i + 1) * n]) for i in range(3)]
        wanted = Needs(needs[0], needs[1], needs[2], *parts)
        with torch.no_grad(), no_autocast(inputs.x):
            way, operands = self._on_codes(packed, inputs)
            grads = way.backward(grad, operands, wanted)
        return [grads.x, grads.scale, grads.bias, *grads.dropped, *grads.a, *grads.b]

    def _on_codes(self, packed: PackedWeight, inputs: Inputs) -> tuple[Way, Operands]:
        # As in Linear4bit, whose product runs in autocast's dtype.
        dtype = self.autocast or packed.compute_dtype or inputs.x.dtype
        stored = packed.as_stored()
        operands = self._operands(
            inputs, stored.shape, dtype, lambda i, j: unpack_range(stored, i, j, dtype=dtype)
        )
        dtypes = tuple(each.dtype for each in operands.lora)
        grouped = runs_grouped(stored.shape, inputs.x, dtype, dtypes)
        return GROUPED if grouped else LOOP, operands

    def _operands(
        self, inputs: Inputs, shape: Sequence[int], dtype: torch.dtype, decode: Decode
    ) -> Operands:
        out_features = shape[2] if self.transposed else shape[1]
        weight = Weight(decode, shape[0], out_features, self.transposed, dtype)
        routing = inputs.order, inputs.expert_offsets
        rows = Rows(*routing, self.top_k, self.gathers, self.scatters)
        factors = zip(inputs.dropped, inputs.a, inputs.b, self.scalings, strict=True)
        lora = [
            LoraInputs(dropped, a, b, scaling, self.autocast or a.dtype)
            for dropped, a, b, scaling in factors
        ]
        return Operands(inputs.x, weight, rows, inputs.scale, inputs.bias, lora)

    def _compiled(self, weight: PackedOperand, inputs: Inputs) -> Tensor:
        out: Tensor = torch.ops.moe_qlora.experts_projection(
            *inputs[:5],
            [dropped for dropped in inputs.dropped if dropped is not None],
            list(inputs.a),
            list(inputs.b),
            weight.tensors,
            weight.numbers,
            weight.dtype,
            weight.compute_dtype,
            *self,
            [dropped is not None for dropped in inputs.dropped],
        )
        return out


def no_autocast(like: Tensor) -> Any:
    """Return a context that disables autocast; free where there is none."""
    on = is_autocast_on(like)
    return torch.autocast(like.device.type, enabled=False) if on else nullcontext()


class _PackedProjection(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, projection: Projection, weight: PackedWeight, routing: Any, n: int, *flat: Any
    ) -> Tensor:
        ctx.projection, ctx.weight, ctx.n = projection, weight.again or weight, n
        ctx.save_for_backward(*routing, *flat)
        kept = None if projection.scatters else take()  # Backward needs no sum to tokens
        if kept is not None:
            return kept[0]
        out = projection.run(weight, _inputs(routing, n, flat))
        if not projection.scatters:
            keep([out])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        inputs = _inputs(saved[:2], ctx.n, saved[2:])
        needs = ctx.needs_input_grad[4:]
        weight = ctx.weight() if callable(ctx.weight) else ctx.weight
        return (None,) * 4 + tuple(ctx.projection.run_backward(weight, inputs, grad, needs))


def _inputs(routing: Any, n: int, flat: Any) -> Inputs:
    x, scale, bias = flat[:3]
    parts = [flat[3 + i * n : 3 + (i + 1) * n] for i in range(3)]
    return Inputs(x, scale, bias, *routing, *parts)
