"""A whole experts module as one operation on a GPU: eager, and as a custom operator in graphs.

`forward.experts_forward` draws the eager path. `projection.py` is the reference for every result.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.limits import padded
from .backend import Call, find_gate, stored_transposed
from .operands import packed_weight
from .projection import first_order, no_autocast, register_products


@cache
def layer_kernels() -> Any:
    """Import `kernels.moe_layer`, which imports Triton."""
    from ..kernels import moe_layer

    return moe_layer


class Inputs(NamedTuple):
    """The tensors, contiguous, and the constants of a call."""

    x: Tensor  # `(T, H)`, in the layer's dtype
    weights: Tensor  # `(T, k)`: the routing weights
    top_k_index: Tensor  # `(T, k)`
    biases: Sequence[Tensor]  # Of both projections, or none
    lora: Sequence[Tensor]  # a and b of each projection with LoRA
    scalings: Sequence[float | None]  # Of both projections; None without LoRA
    packed: Sequence[Any]  # Both packed weights
    gate: Sequence[Any]  # Fields of `gate_kernels.Gate`
    transposed: bool  # Whether the packed weights are stored `(E, in, out)`


def read_inputs(module: Any, call: Call, index: Tensor, weights: Tensor) -> Inputs:
    """Return the inputs of a call to which `choose_backend` gave the fused layer."""
    biases = [getattr(module, f"{name}_bias") for name in call.names] if module.has_bias else []
    packed: Any = call.weights
    lora: list[Tensor] = []
    scalings: list[float | None] = []
    for factors in call.lora:
        scalings.append(float(factors[0].scaling) if factors else None)
        lora += [tensor for each in factors for tensor in (each.a, each.b)]
    x = call.x.to(call.autocast or call.x.dtype).contiguous()
    gate: Any = find_gate(module)
    return Inputs(
        x, weights.contiguous(), index.contiguous(), biases, lora, scalings, packed, gate,
        stored_transposed(module, packed[0]),
    )  # fmt: skip


def make_layer(inputs: Inputs) -> Any:
    """Return the `moe_layer.Layer` of a call, whose tensors must lie on one device."""
    kernels, x = layer_kernels(), inputs.x
    first, second = (weight.aligned() for weight in inputs.packed)
    tensors = *inputs[1:3], *inputs.biases, *inputs.lora, first.codes, second.codes
    device = x.get_device()
    if any(tensor.get_device() != device for tensor in tensors):  # a kernel gets addresses only
        devices = ", ".join(sorted({str(tensor.device) for tensor in (x, *tensors)}))
        raise ValueError(f"an experts layer's tensors lie on several devices: {devices}.")
    return kernels.Layer(first, second, inputs.transposed, kernels.Gate(*inputs.gate), x.dtype)


def make_operands(x: Tensor, weights: Tensor, biases: Any, lora: Any, scalings: Any) -> Any:
    """Return the `moe_layer.Operands` of a call."""
    kernels, factors = layer_kernels(), iter(lora)
    make = kernels.Lora
    loras = [None if s is None else make(next(factors), next(factors), s) for s in scalings]
    return kernels.Operands(x, weights, biases or (None, None), loras)


def save_for_backward(inputs: Inputs, layer: Any, saved: Sequence[Tensor]) -> Tensor:
    """Return room for the output `(T, H)`, with its backward."""
    # Non-reentrant checkpointing stops recomputing at the last saved tensor: since the output is
    # computed after it, the second projection is not recomputed.
    first, second = layer.first.refetch, layer.second.refetch
    if first is not None and second is not None:
        # Offloaded or ZeRO-3 weights are read again; `layer` would hold their memory
        kind, rest = type(layer), layer[2:]
        layer = lambda: kind(first().aligned(), second().aligned(), *rest)  # noqa: E731
    given = layer, inputs.scalings, len(inputs.biases), saved, inputs.x, inputs.weights
    return _FusedLayer.apply(*given, *inputs.biases, *inputs.lora)


class _FusedLayer(torch.autograd.Function):
    """Saves the tensors that backward needs, and allocates the output."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, scalings: Any, biases: int, saved: Any, x: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.layer, ctx.scalings, ctx.biases = layer, scalings, biases
        ctx.save_for_backward(x, *others, *saved)
        return torch.empty_like(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weights, *rest, ints, pre, products = ctx.saved_tensors
        n, layer = ctx.biases, ctx.layer() if callable(ctx.layer) else ctx.layer
        operands = make_operands(x, weights, rest[:n], rest[n:], ctx.scalings)
        saved, needs_x = (ints, pre, products), ctx.needs_input_grad[4]
        grads = layer_backward(layer, operands, grad, saved, needs_x)
        return *[None] * 4, *grads[:2], *[None] * n, *grads[2:]


def layer_backward(
    layer: Any, operands: Any, grad: Tensor, saved: Sequence[Tensor], needs_x: bool
) -> list[Tensor | None]:
    """Return the gradients of x and the routing weights, then of each LoRA factor."""
    kernels, weights = layer_kernels(), operands.weights
    with torch.no_grad(), no_autocast(grad):
        top_k = weights.shape[-1]
        routing = kernels.Routing(saved[0], weights.numel(), layer.first.experts, top_k)
        grads = kernels.backward(layer, routing, saved[1:], grad, operands, needs_x=needs_x)
    x, of_weights, *factors = grads
    return [x, of_weights, *(factor for factor in factors if factor is not None)]


# The custom operator of compiled graphs, whose arguments are tensors and plain numbers.

_TENSORS = "Tensor[] biases, Tensor[] lora, Tensor[] packed"
_CONSTANTS = "str act, int[] ints, float[] floats) -> Tensor[]"
_FORWARD = f"(Tensor x, Tensor weights, Tensor index, {_TENSORS}, {_CONSTANTS}"
_BACKWARD = (
    f"(Tensor grad, Tensor x, Tensor weights, {_TENSORS}, Tensor[] saved, bool needs_x, "
    f"{_CONSTANTS}"
)


def by_operator(inputs: Inputs) -> Tensor:
    """Return the output `(T, H)` by the custom operator; `packed` are `PackedOperand`s."""
    first, second = inputs.packed
    act, gated, interleaved, limit, alpha, shift = inputs.gate
    flags = gated, interleaved, limit is not None, inputs.transposed
    ints = [*first.numbers, *second.numbers, *map(int, flags)]
    ints += [int(scaling is not None) for scaling in inputs.scalings]
    floats = [limit or 0.0, alpha, shift, *(scaling or 0.0 for scaling in inputs.scalings)]
    return torch.ops.moe_qlora.experts_layer(
        *inputs[:5], [*first.tensors, *second.tensors], act, ints, floats
    )[0]


def _inputs_of(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any,
    act: str, ints: Sequence[int], floats: Sequence[float],
) -> Inputs:  # fmt: skip
    """Return the inputs from which `by_operator` made its arguments."""
    tensors, *numbers = iter(packed), ints[:6], ints[6:12]
    gated, interleaved, limited, transposed, *adapted = map(bool, ints[12:])
    limit, alpha, shift, *values = floats
    scalings = [value if flag else None for value, flag in zip(values, adapted, strict=True)]
    weights_of = [packed_weight(tensors, each, x.dtype) for each in numbers]
    gate = act, gated, interleaved, limit if limited else None, alpha, shift
    return Inputs(x, weights, index, biases, lora, scalings, weights_of, gate, transposed)


def _layer_forward(x: Tensor, *others: Any) -> list[Tensor]:
    inputs, kernels = _inputs_of(x, *others), layer_kernels()
    layer = make_layer(inputs)
    with torch.no_grad(), no_autocast(x):
        operands = make_operands(x, inputs.weights, inputs.biases, inputs.lora, inputs.scalings)
        state = kernels.gate_up_forward(layer, inputs.top_k_index, operands)
        out = kernels.down_forward(layer, state)
    return [out, state.routing.ints, *state.saved]


def _layer_forward_fake(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any, act: str,
    ints: Sequence[int], floats: Any,
) -> list[Tensor]:  # fmt: skip
    from ..kernels.routing import ints_size  # needs Triton

    (experts, rows, columns), transposed, count = ints[3:6], ints[15], index.numel()
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
    inputs = _inputs_of(x, weights, saved[0], biases, lora, packed, *constants)
    operands = make_operands(x, weights, biases, lora, inputs.scalings)
    grads = layer_backward(make_layer(inputs), operands, grad, saved, needs_x)
    return [grad.new_empty(0) if g is None else g for g in grads]


def _layer_backward_fake(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any, saved: Any,
    needs_x: bool, *constants: Any,
) -> list[Tensor]:  # fmt: skip
    first = torch.empty_like(x) if needs_x else grad.new_empty(0)
    return [first, torch.empty_like(weights), *(torch.empty_like(f) for f in lora)]


def _layer_setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, weights, _, biases, lora, packed, *ctx.constants = inputs
    ctx.counts = len(biases), len(lora), len(packed), 3
    ctx.save_for_backward(x, weights, *biases, *lora, *packed, *output[1:])
    ctx.set_materialize_grads(False)


@first_order
def _layer_autograd(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    x, weights, *rest = ctx.saved_tensors
    tensors = iter(rest)
    biases, lora, packed, saved = (list(islice(tensors, count)) for count in ctx.counts)
    need, found = ctx.needs_input_grad, [None, None, *[None] * len(lora)]
    if grads[0] is not None:
        found = torch.ops.moe_qlora.experts_layer_backward(
            grads[0], x, weights, biases, lora, packed, saved, need[0], *ctx.constants
        )
    first, second = (found[i] if need[i] else None for i in (0, 1))
    lists = [None] * len(biases), list(found[2:]), [None] * len(packed)
    return first, second, None, *lists, None, None, None


def register_operators() -> None:
    """Define the custom operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "experts_layer"):
        return

    operator: Any = partial(torch.library.custom_op, mutates_args=())
    layer = operator("moe_qlora::experts_layer", _layer_forward, schema=_FORWARD)
    layer.register_fake(_layer_forward_fake)
    layer.register_autograd(_layer_autograd, setup_context=_layer_setup)
    back = operator("moe_qlora::experts_layer_backward", _layer_backward, schema=_BACKWARD)
    back.register_fake(_layer_backward_fake)
    register_products()
