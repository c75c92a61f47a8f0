"""The custom operator of the fused layer, which a compiled graph calls.

Its arguments are tensors and plain numbers: packed weights as an `operands.PackedOperand`, a gate
and a call's constants as lists and flags. Forward and backward have a fake version that returns
only shapes to the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.limits import padded
from .backend import layer_kernels
from .fused import check_devices, layer_backward, make_layer, make_operands
from .operands import packed_weight
from .projection import first_order, no_autocast, register_products

# `_LAYER_CONSTANTS` follow the tensors of forward and backward alike.

_LAYER_CONSTANTS = (
    "int[] first, int[] second, str act, bool[] gate_flags, float[] gate_numbers, "
    "bool[] adapted, float[] scalings, bool transposed"
)
_LAYER_FORWARD = (
    "(Tensor x, Tensor weights, Tensor index, Tensor[] biases, Tensor[] lora, Tensor[] packed, "
    f"{_LAYER_CONSTANTS}) -> Tensor[]"
)
_LAYER_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weights, Tensor[] biases, Tensor[] lora, Tensor[] packed, "
    f"Tensor[] saved, bool needs_x, {_LAYER_CONSTANTS}) -> Tensor[]"
)


def _layer_of(packed: Sequence[Tensor], dtype: torch.dtype, constants: Sequence[Any]) -> Any:
    first, second, act, flags, (alpha, shift, *limit), _, _, transposed = constants
    tensors = iter(packed)
    weights = [packed_weight(tensors, numbers, dtype) for numbers in (first, second)]
    gate = act, *flags, limit[0] if limit else None, alpha, shift
    return make_layer(weights, gate, transposed, dtype)


def _scalings(constants: Sequence[Any]) -> list[float | None]:
    adapted, values = constants[5], iter(constants[6])
    return [next(values) if flag else None for flag in adapted]


def _layer_forward(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any, *constants: Any
) -> list[Tensor]:
    layer = _layer_of(packed, x.dtype, constants)
    check_devices(x, weights, index, *biases, *lora, layer.first.codes, layer.second.codes)
    kernels = layer_kernels()
    with torch.no_grad(), no_autocast(x):
        operands = make_operands(x, weights, biases, lora, _scalings(constants))
        state = kernels.gate_up_forward(layer, index, operands)
        out = kernels.down_forward(layer, state)
    return [out, state.routing.ints, *state.saved]


def _layer_forward_fake(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any, *constants: Any
) -> list[Tensor]:
    from ..kernels.routing import ints_size  # needs Triton

    experts, rows, columns = constants[0][-3:]
    transposed, count = constants[-1], index.numel()
    ranks = [padded(a.shape[0] // experts) for a in lora[::2]]
    return [
        torch.empty_like(x),
        index.new_empty(ints_size(count, experts), dtype=torch.int32),
        x.new_empty(count, columns if transposed else rows),
        x.new_empty(count * sum(ranks)),
    ]


def _layer_backward(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any, saved: Any,
    needs_x: bool, *constants: Any,
) -> list[Tensor]:  # fmt: skip
    layer = _layer_of(packed, x.dtype, constants)
    operands = make_operands(x, weights, biases, lora, _scalings(constants))
    grads = layer_backward(layer, operands, grad, saved, needs_x)
    return [grad.new_empty(0) if g is None else g for g in grads]


def _layer_backward_fake(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any, saved: Any,
    needs_x: bool, *constants: Any,
) -> list[Tensor]:  # fmt: skip
    first = torch.empty_like(x) if needs_x else grad.new_empty(0)
    return [first, torch.empty_like(weights), *(torch.empty_like(f) for f in lora)]


def _layer_setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, _, biases, lora, packed, *constants = inputs
    ctx.counts = len(biases), len(lora), len(packed)
    ctx.constants = constants
    ctx.save_for_backward(x, weights, *biases, *lora, *packed, *output[1:])
    ctx.set_materialize_grads(False)


@first_order
def _layer_autograd(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    x, weights, *rest = ctx.saved_tensors
    biases, lora, packed, saved = split(rest, ctx.counts)
    lists = [None] * len(biases), [None] * len(lora), [None] * len(packed)
    if grads[0] is None:
        return None, None, None, *lists, *no_grads(ctx.constants)
    need = ctx.needs_input_grad
    out = torch.ops.moe_qlora.experts_layer_backward(
        grads[0], x, weights, biases, lora, packed, saved, need[0], *ctx.constants
    )
    return (
        out[0] if need[0] else None,
        out[1] if need[1] else None,
        None,
        lists[0],
        list(out[2:]),
        lists[2],
        *no_grads(ctx.constants),
    )


def no_grads(constants: Sequence[Any]) -> list[list[Any] | None]:
    """Return no gradient for each constant; torch treats an empty list as one of tensors."""
    return [[] if value == [] else None for value in constants]


def split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Cut a list into parts of these lengths, and the rest."""
    parts, rest = [], list(tensors)
    for count in counts:
        parts.append(rest[:count])
        rest = rest[count:]
    return [*parts, rest]


def register_operators() -> None:
    """Define the custom operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "experts_layer"):
        return

    operator: Any = partial(torch.library.custom_op, mutates_args=())
    layer = operator("moe_qlora::experts_layer", _layer_forward, schema=_LAYER_FORWARD)
    layer.register_fake(_layer_forward_fake)
    layer.register_autograd(_layer_autograd, setup_context=_layer_setup)
    back = operator("moe_qlora::experts_layer_backward", _layer_backward, schema=_LAYER_BACKWARD)
    back.register_fake(_layer_backward_fake)
    register_products()
