"""One projection over packed experts as an operation with gradients, eager and compiled.

Eager calls go through a `torch.autograd.Function`. Under `torch.compile` the same computation is
one custom operator, opaque to the compiler, so that a loop whose length depends on the routing
neither breaks the graph nor is unrolled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import projection, reference
from ..kernels.reference import Grads, Needs, Rows, Term, Weight
from ..kernels.weights import PackedWeight
from ..packing.codec import unpack_range


class Inputs(NamedTuple):
    """Tensors of one projection; R sorted rows, E experts.

    Attributes:
        x: `(N, in)`.
        scale: `(R,)` factors of the rows, or None.
        bias: `(E, out)`, or None.
        order: `(R,)` which choice (token x k + slot) stands in each sorted row.
        bounds: `(E + 1,)` offsets of the experts' rows.
        sources: For each LoRA term what it reads in the place of x, or None for x.
        a: `(E r, in)` for each term.
        b: `(out, r E)` for each term.
    """

    x: Tensor
    scale: Tensor | None
    bias: Tensor | None
    order: Tensor
    bounds: Tensor
    sources: Sequence[Tensor | None]
    a: Sequence[Tensor]
    b: Sequence[Tensor]


@dataclass(frozen=True)
class Projection:
    """What is constant of one call of one projection.

    Attributes:
        transposed: Whether the stack is stored `(E, in, out)`.
        top_k: k, choices a token.
        gathers: Whether x holds tokens `(T, in)`, else sorted rows `(R, in)`.
        scatters: Whether the result is summed to tokens `(T, out)`, else sorted rows `(R, out)`.
        partial: Whether some rows belong to no expert that is held here.
        scalings: One factor for each LoRA term.
        autocast: The autocast dtype, None outside autocast.
    """

    transposed: bool
    top_k: int
    gathers: bool
    scatters: bool
    partial: bool
    scalings: tuple[float, ...]
    autocast: torch.dtype | None

    def plain(self, weight: Tensor, inputs: Inputs) -> Tensor:
        """The same with a stack that is not packed; ordinary autograd, its gradient included."""
        dtype = self.autocast or inputs.x.dtype
        view = self._weight(weight.shape, dtype, lambda first, last: weight[first:last].to(dtype))
        rows, terms = self._rows(inputs), self._terms(inputs)
        return reference.forward(inputs.x, view, rows, inputs.scale, inputs.bias, terms)

    def packed(self, stack: PackedWeight, inputs: Inputs) -> Tensor:
        """The projection from packed codes; no gradient for these."""
        flat = (inputs.x, inputs.scale, inputs.bias, *inputs.sources, *inputs.a, *inputs.b)
        routing = (inputs.order, inputs.bounds)
        out: Tensor = _PackedProjection.apply(self, stack, routing, len(inputs.a), *flat)
        return out

    def run(self, stack: PackedWeight, inputs: Inputs) -> Tensor:
        """Forward alone."""
        with torch.no_grad(), no_autocast(inputs.x):
            return forward(
                inputs.x,
                self._packed_weight(stack, inputs.x),
                self._rows(inputs),
                inputs.scale,
                inputs.bias,
                self._terms(inputs),
            )

    def run_backward(
        self, stack: PackedWeight, inputs: Inputs, grad: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients in the order x, scale, bias, sources, a, b; None where not needed."""
        n = len(inputs.a)
        parts = [list(needs[3 + i * n : 3 + (i + 1) * n]) for i in range(3)]
        wanted = reference.Needs(needs[0], needs[1], needs[2], *parts)
        with torch.no_grad(), no_autocast(inputs.x):
            grads = backward(
                grad,
                inputs.x,
                self._packed_weight(stack, inputs.x),
                self._rows(inputs),
                inputs.scale,
                inputs.bias,
                self._terms(inputs),
                wanted,
            )
        return [grads.x, grads.scale, grads.bias, *grads.sources, *grads.a, *grads.b]

    def _packed_weight(self, stack: PackedWeight, x: Tensor) -> reference.Weight:
        # As in Linear4bit, whose product runs in autocast's dtype whatever it cast its input to.
        dtype = self.autocast or stack.compute_dtype or x.dtype
        return self._weight(
            stack.shape, dtype, lambda first, last: unpack_range(stack, first, last, dtype=dtype)
        )

    def _weight(
        self, shape: Sequence[int], dtype: torch.dtype, decode: reference.Decode
    ) -> reference.Weight:
        out_features = shape[2] if self.transposed else shape[1]
        return reference.Weight(decode, shape[0], out_features, self.transposed, dtype)

    def _rows(self, inputs: Inputs) -> reference.Rows:
        return reference.Rows(
            inputs.order, inputs.bounds, self.top_k, self.gathers, self.scatters, self.partial
        )

    def _terms(self, inputs: Inputs) -> list[reference.Term]:
        factors = zip(inputs.sources, inputs.a, inputs.b, self.scalings, strict=True)
        return [
            reference.Term(source, a, b, scaling, self.autocast or a.dtype)
            for source, a, b, scaling in factors
        ]


def no_autocast(like: Tensor) -> Any:
    """A block without autocast; costs the host nothing where there is none."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _PackedProjection(torch.autograd.Function):
    """Saves its inputs and nothing that it computes."""

    @staticmethod
    def forward(
        ctx: Any, projection: Projection, stack: PackedWeight, routing: Any, n: int, *flat: Any
    ) -> Tensor:
        ctx.projection, ctx.stack, ctx.n = projection, stack, n
        ctx.save_for_backward(*routing, *flat)
        return projection.run(stack, _inputs(routing, n, flat))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        inputs = _inputs(saved[:2], ctx.n, saved[2:])
        needs = ctx.needs_input_grad[4:]
        return (None,) * 4 + tuple(ctx.projection.run_backward(ctx.stack, inputs, grad, needs))


def _inputs(routing: Any, n: int, flat: Any) -> Inputs:
    x, scale, bias = flat[:3]
    parts = [flat[3 + i * n : 3 + (i + 1) * n] for i in range(3)]
    return Inputs(x, scale, bias, *routing, *parts)


# Under torch.compile


def compiled_projection(
    module: nn.Module, name: str, projection: Projection, inputs: Inputs
) -> Tensor:
    """`Projection.packed` as one custom operator, for graphs."""
    tensors, constants = packed_inputs(module, name)
    dropped = [source is not None for source in inputs.sources]
    constants = (
        constants,
        projection.transposed,
        projection.top_k,
        projection.gathers,
        projection.scatters,
        projection.partial,
        list(projection.scalings),
        _dtype_name(projection.autocast),
        dropped,
    )
    operator = torch.ops.moe_qlora.experts_projection
    out: Tensor = operator(
        inputs.x,
        inputs.scale,
        inputs.bias,
        inputs.order,
        inputs.bounds,
        [source for source in inputs.sources if source is not None],
        list(inputs.a),
        list(inputs.b),
        tensors,
        repr(constants),
    )
    return out


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def packed_inputs(module: Any, name: str) -> tuple[list[Tensor], Any]:
    """A packed parameter as tensors and constants, by attribute reads that Dynamo can follow."""
    stack = module.parametrizations[name]
    first, codes = stack[0], stack.original
    if hasattr(first, "scale_bits"):
        shape, dtype = list(first.weight_shape), first.weight_dtype
        return [codes, first.scale_bits], ["int8", shape, _dtype_name(dtype), 0, 0, ""]
    state = first.quant_state
    compute = getattr(first, "compute_dtype", None)
    tensors = [codes, state.absmax, state.code]
    nested = 0
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
        nested = state.state2.blocksize
    shape = list(state.shape)
    constants = [
        state.quant_type,
        shape,
        _dtype_name(state.dtype),
        state.blocksize,
        nested,
        _dtype_name(compute),
    ]
    return tensors, constants


def forward(
    x: Tensor,
    weight: Weight,
    rows: Rows,
    scale: Tensor | None,
    bias: Tensor | None,
    terms: Sequence[Term],
) -> Tensor:
    """`reference.forward`, by the fastest backend that fits."""
    backend = projection if projection.fits(x, weight, terms) else reference
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
    backend = projection if projection.fits(x, weight, terms) else reference
    return backend.backward(grad, x, weight, rows, scale, bias, terms, needs)


__all__ = [
    "Inputs",
    "Projection",
    "compiled_projection",
    "packed_inputs",
]
