"""moe_qlora/experts/projection_op.py: to be described."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.weights import NestedAbsmax, PackedWeight
from .projection import Inputs, Projection, _dtype


def _stack(tensors: Sequence[Tensor], constants: Any) -> PackedWeight:
    kind, shape, dtype_name, blocksize, nested, compute = constants
    dtype = _dtype(dtype_name)
    assert dtype is not None
    size = torch.Size(shape)
    if kind == "int8":
        scales = tensors[1].view(torch.float32)
        return PackedWeight(tensors[0], scales, None, 0, None, size, kind, dtype)
    inner = NestedAbsmax(tensors[5], tensors[4], tensors[3], nested) if nested else None
    return PackedWeight(
        tensors[0], tensors[1], tensors[2], blocksize, inner, size, kind, dtype, _dtype(compute)
    )


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
) -> tuple[Projection, PackedWeight, Inputs, list[bool]]:
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
    "register_operators",
]
