"""moe_qlora/experts/fused_op.py: to be described."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.limits import padded
from ..kernels.weights import NestedAbsmax, PackedWeight
from .fused import _backward, _check_devices, _kernels, _layer, _loras
from .projection import no_autocast

# Compiled


class _Constants(NamedTuple):
    """What the operators take as a string."""

    gate: tuple[Any, ...]
    stacks: list[tuple[Any, ...]]
    scalings: list[float | None]
    transposed: bool
    partial: bool
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        """In which to compute."""
        return cast(torch.dtype, getattr(torch, self.dtype_name.removeprefix("torch.")))


@cache
def _constants(text: str) -> _Constants:
    return _Constants(*ast.literal_eval(text))


def _packed_stacks(tensors: Sequence[Tensor], constants: _Constants) -> list[PackedWeight]:
    packed = []
    for count, kind, shape, blocksize, nested in constants.stacks:
        mine, tensors = tensors[:count], tensors[count:]
        if kind == "int8":
            scales = mine[1].view(torch.float32)
            packed.append(PackedWeight(mine[0], scales, None, 0, None, shape, kind, torch.float16))
            continue
        inner = NestedAbsmax(mine[5], mine[4], mine[3], nested) if nested else None
        packed.append(
            PackedWeight(mine[0], mine[1], mine[2], blocksize, inner, shape, kind, torch.float16)
        )
    return packed


def _forward_op(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any, constants: str
) -> list[Tensor]:
    """The output, the routing, and what else backward needs."""
    kernels, made = _kernels(), _constants(constants)
    _check_devices(x, weights, index, *biases, *lora)
    layer = _layer(_packed_stacks(packed, made), made)
    with torch.no_grad(), no_autocast(x):
        out, routing, saved = kernels.forward(
            layer, x, weights, index, *(biases or (None, None)), *_loras(lora, made.scalings)
        )
    return [out, routing.ints, *saved]


def _forward_fake(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    biases: Sequence[Tensor],
    lora: Sequence[Tensor],
    packed: Sequence[Tensor],
    constants: str,
) -> list[Tensor]:
    made = _constants(constants)
    experts, rows, cols = made.stacks[0][2]
    count = index.numel()
    ranks = [padded(a.shape[0] // experts) for a in lora[::2]]
    return [
        torch.empty_like(x),
        index.new_empty(_kernels().ints_size(count, experts), dtype=torch.int32),
        x.new_empty(count, cols if made.transposed else rows),
        x.new_empty(count * sum(ranks)),
    ]


def _backward_op(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any,
    saved: Any, constants: str, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    made = _constants(constants)
    layer = _layer(_packed_stacks(packed, made), made)
    grads = _backward(layer, made.scalings, grad, x, weights, biases, lora, saved, needs_x)
    return [grad.new_empty(0) if g is None else g for g in grads]


def _backward_fake(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any,
    saved: Any, constants: str, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    first = torch.empty_like(x) if needs_x else grad.new_empty(0)
    return [first, torch.empty_like(weights), *(torch.empty_like(f) for f in lora)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, _, biases, lora, packed, constants = inputs
    ctx.counts = len(biases), len(lora), len(packed)
    ctx.constants = constants
    ctx.save_for_backward(x, weights, *biases, *lora, *packed, *output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    x, weights, *rest = ctx.saved_tensors
    parts = []
    for count in ctx.counts:
        parts.append(rest[:count])
        rest = rest[count:]
    biases, lora, packed = parts
    if grads[0] is None:
        return (None,) * 7
    out = torch.ops.moe_qlora.experts_layer_backward(
        grads[0], x, weights, biases, lora, packed, rest, ctx.constants,
        ctx.needs_input_grad[0],
    )  # fmt: skip
    need = ctx.needs_input_grad
    return (
        out[0] if need[0] else None,
        out[1] if need[1] else None,
        None,
        [None] * len(biases),
        list(out[2:]),
        [None] * len(packed),
        None,
    )


def register_operators() -> None:
    """Define the custom operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "experts_layer"):
        return
    inputs = "Tensor x, Tensor weights, {}Tensor[] biases, Tensor[] lora, Tensor[] packed"
    forward = torch.library.custom_op(
        "moe_qlora::experts_layer",
        _forward_op,
        mutates_args=(),
        schema=f"({inputs.format('Tensor index, ')}, str constants) -> Tensor[]",
    )
    forward.register_fake(_forward_fake)
    backward = torch.library.custom_op(
        "moe_qlora::experts_layer_backward",
        _backward_op,
        mutates_args=(),
        schema=f"(Tensor grad, {inputs.format('')}, Tensor[] saved, str constants, bool needs_x) "
        "-> Tensor[]",
    )
    backward.register_fake(_backward_fake)
    forward.register_autograd(_autograd, setup_context=_setup)


__all__ = [
    "register_operators",
]
