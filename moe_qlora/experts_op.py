"""One projection over packed experts as an operation with gradients, eager and compiled.

Eager calls go through a `torch.autograd.Function`. Under `torch.compile` the same computation is
one custom operator, opaque to the compiler, so that a loop whose length depends on the routing
neither breaks the graph nor is unrolled.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

from .codec import Int8State, PackedStack, unpack_range
from .kernels import dispatch, reference
from .kernels.packed import Packed


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

    def packed(self, stack: PackedStack, inputs: Inputs) -> Tensor:
        """The projection from packed codes; no gradient for these."""
        flat = (inputs.x, inputs.scale, inputs.bias, *inputs.sources, *inputs.a, *inputs.b)
        routing = (inputs.order, inputs.bounds)
        out: Tensor = _PackedProjection.apply(self, stack, routing, len(inputs.a), *flat)
        return out

    def run(self, stack: PackedStack, inputs: Inputs) -> Tensor:
        """Forward alone."""
        with torch.no_grad(), no_autocast(inputs.x):
            return dispatch.forward(
                inputs.x,
                self._packed_weight(stack, inputs.x),
                self._rows(inputs),
                inputs.scale,
                inputs.bias,
                self._terms(inputs),
            )

    def run_backward(
        self, stack: PackedStack, inputs: Inputs, grad: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients in the order x, scale, bias, sources, a, b; None where not needed."""
        n = len(inputs.a)
        parts = [list(needs[3 + i * n : 3 + (i + 1) * n]) for i in range(3)]
        wanted = reference.Needs(needs[0], needs[1], needs[2], *parts)
        with torch.no_grad(), no_autocast(inputs.x):
            grads = dispatch.backward(
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

    def _packed_weight(self, stack: PackedStack, x: Tensor) -> reference.Weight:
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
        ctx: Any, projection: Projection, stack: PackedStack, routing: Any, n: int, *flat: Any
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


def packed_of(stack: PackedStack) -> Packed:
    """A packed stack `(E, rows, cols)` as the kernels take it."""
    shape = (stack.shape[0], stack.shape[1], stack.numel // stack.shape[0] // stack.shape[1])
    state = stack.state
    if isinstance(state, Int8State):
        return Packed(stack.codes.view(-1), state.scales, None, 0, None, shape, "int8")
    nested = None
    if state.nested:
        inner = state.state2
        nested = (inner.code, inner.absmax, state.offset, inner.blocksize)
    codes = stack.codes.detach().view(-1).view(torch.uint8)
    return Packed(codes, state.absmax, state.code, state.blocksize, nested, shape, stack.kind)


def _stack(tensors: Sequence[Tensor], constants: Any) -> PackedStack:
    kind, shape, dtype_name, blocksize, nested, compute = constants
    dtype = _dtype(dtype_name)
    assert dtype is not None
    size = torch.Size(shape)
    if kind == "int8":
        scales = tensors[1].view(torch.float32)
        return PackedStack(tensors[0], Int8State(scales, size, dtype), kind, size, dtype)
    inner = None
    if nested:
        inner = QuantState(
            absmax=tensors[4], code=tensors[5], blocksize=nested, dtype=torch.float32
        )
    state = QuantState(
        absmax=tensors[1],
        shape=size,
        code=tensors[2],
        blocksize=blocksize,
        quant_type=kind,
        dtype=dtype,
        offset=tensors[3] if nested else None,
        state2=inner,
    )
    return PackedStack(tensors[0], state, kind, size, dtype, _dtype(compute))


def _parse(
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    bounds: Tensor,
    sources: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    packed: Sequence[Tensor],
    constants: str,
) -> tuple[Projection, PackedStack, Inputs, list[bool]]:
    """The operator's arguments, as its schema has them, back to what `Projection` takes."""
    stack, transposed, top_k, gathers, scatters, partial, scalings, autocast, dropped = (
        ast.literal_eval(constants)
    )
    given = iter(sources)
    full = [next(given) if drop else None for drop in dropped]
    projection = Projection(
        transposed, top_k, gathers, scatters, partial, tuple(scalings), _dtype(autocast)
    )
    inputs = Inputs(x, scale, bias, order, bounds, full, a, b)
    return projection, _stack(packed, stack), inputs, dropped


def _forward_op(*args: Any) -> Tensor:
    projection, stack, inputs, _ = _parse(*args)
    return projection.run(stack, inputs)


def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    (_, shape, *_), transposed, top_k, gathers, scatters, *_ = ast.literal_eval(rest[-1])
    rows = x.shape[0] * top_k if gathers else x.shape[0]
    return x.new_empty(rows // top_k if scatters else rows, shape[2] if transposed else shape[1])


def _backward_op(grad: Tensor, *args: Any) -> list[Tensor]:
    *forward, needs = args
    projection, stack, inputs, dropped = _parse(*forward)
    n = len(inputs.a)
    grads = projection.run_backward(stack, inputs, grad, needs)
    kept = [g for i, g in enumerate(grads) if not (3 <= i < 3 + n) or dropped[i - 3]]
    return [grad.new_empty(0) if g is None else g for g in kept]


def _backward_fake(grad: Tensor, *args: Any) -> list[Tensor]:
    x, scale, bias, _, _, sources, a, b, _, constants, needs = args
    n = len(a)
    likes = [x, scale, bias, *sources, *a, *b]
    dropped = ast.literal_eval(constants)[-1]
    source_needs = [need for need, drop in zip(needs[3 : 3 + n], dropped, strict=True) if drop]
    wanted = [*needs[:3], *source_needs, *needs[3 + n :]]
    return [
        torch.empty_like(like) if need and like is not None else grad.new_empty(0)
        for like, need in zip(likes, wanted, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, bias, order, bounds, sources, a, b, packed, constants = inputs
    ctx.counts = len(sources), len(a), len(packed)
    ctx.constants = constants
    ctx.save_for_backward(x, scale, bias, order, bounds, *sources, *a, *b, *packed)


def _autograd(ctx: Any, grad: Tensor) -> Any:
    x, scale, bias, order, bounds, *rest = ctx.saved_tensors
    ns, n, npacked = ctx.counts
    sources, rest = rest[:ns], rest[ns:]
    a, b, packed = rest[:n], rest[n : 2 * n], rest[2 * n :]
    need = ctx.needs_input_grad
    dropped = ast.literal_eval(ctx.constants)[-1]
    given = iter([True] * ns)
    source_needs = [bool(drop and next(given)) for drop in dropped]
    # Lists count as one input: their members' flags are not told apart here.
    needs = [need[0], need[1], need[2], *source_needs, *([True] * n), *([True] * n)]
    grads = torch.ops.moe_qlora.experts_projection_backward(
        grad, x, scale, bias, order, bounds, sources, a, b, packed, ctx.constants, needs,
    )  # fmt: skip
    single = [g if flag else None for g, flag in zip(grads[:3], needs[:3], strict=True)]
    lists = grads[3:]
    return (
        *single,
        None,
        None,
        list(lists[:ns]),
        list(lists[ns : ns + n]),
        list(lists[ns + n :]),
        [None] * npacked,
        None,
    )


def register_operators() -> None:
    """Define the custom operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "experts_projection"):
        return
    tensors = (
        "Tensor x, Tensor? scale, Tensor? bias, Tensor order, Tensor bounds, "
        "Tensor[] sources, Tensor[] a, Tensor[] b, Tensor[] packed, str constants"
    )
    forward = torch.library.custom_op(
        "moe_qlora::experts_projection",
        _forward_op,
        mutates_args=(),
        schema=f"({tensors}) -> Tensor",
    )
    forward.register_fake(_forward_fake)
    backward = torch.library.custom_op(
        "moe_qlora::experts_projection_backward",
        _backward_op,
        mutates_args=(),
        schema=f"(Tensor grad, {tensors}, bool[] needs) -> Tensor[]",
    )
    backward.register_fake(_backward_fake)
    forward.register_autograd(_autograd, setup_context=_setup)


__all__ = [
    "Inputs",
    "Projection",
    "compiled_projection",
    "packed_inputs",
    "packed_of",
    "register_operators",
]
