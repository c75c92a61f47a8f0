"""A whole experts module as one operation on a GPU: eager, and as a custom operator in graphs.

`run` computes a call by `kernels/moe_layer.py`, for calls that `backend.choose_backend` gives it.
`projection.py` is the reference for every result here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..kernels.limits import padded
from ..kernels.weights import PackedWeight
from .backend import Call, find_gate, stored_transposed
from .kept import keep, take
from .operands import LoraFactors, packed_weight
from .projection import first_order, no_autocast, register_products


@cache
def layer_kernels() -> Any:
    """Import `kernels.moe_layer`, which imports Triton."""
    from ..kernels import moe_layer

    return moe_layer


def run(module: Any, call: Call, index: Tensor, routing_weights: Tensor) -> Tensor:
    """Return the module's output `(T, H)` in x's dtype; `choose_backend` gave the fused layer."""
    biases = [getattr(module, f"{name}_bias") for name in call.names] if module.has_bias else []
    packed: Any = call.weights
    lora: list[Tensor] = []
    scalings: list[float | None] = []
    for weight, factors in zip(packed, call.lora, strict=True):
        scalings.append(float(factors[0].scaling) if factors else None)
        lora += joined_lora(factors, weight.shape[0])
    x = call.x.to(call.autocast or call.x.dtype).contiguous()
    routing_weights, index = routing_weights.contiguous(), index.contiguous()
    gate: Any = find_gate(module)
    transposed = stored_transposed(module, packed[0])
    out: Tensor
    if torch.compiler.is_compiling():
        act, gated, interleaved, limit, alpha, shift = gate
        tensors = [tensor for weight in packed for tensor in weight.tensors]
        numbers = [alpha, shift] if limit is None else [alpha, shift, limit]
        adapted = [scaling is not None for scaling in scalings]
        values = [scaling for scaling in scalings if scaling is not None]
        out = torch.ops.moe_qlora.experts_layer(
            x, routing_weights, index, biases, lora, tensors, packed[0].numbers, packed[1].numbers,
            act, [gated, interleaved], numbers, adapted, values, transposed,
        )[0]  # fmt: skip
    else:
        check_devices(x, routing_weights, index, *biases, *lora)
        layer = make_layer(packed, gate, transposed, x.dtype)
        work = _Work(layer, scalings, len(biases))
        out = _FusedLayer.apply(work, index, x, routing_weights, *biases, *lora)
        # A checkpoint's recomputation stops before this line, unless the layer needs the output.
        with no_autocast(x):
            layer_kernels().down_forward(layer, work.state(), out)
    return out if out.dtype == call.x.dtype else out.to(call.x.dtype)


def joined_lora(lora: Sequence[LoraFactors], experts: int) -> tuple[Tensor, ...]:
    """Concatenate a and b of one projection's adapters along their ranks; () for none."""
    if not lora:
        return ()
    if len(lora) == 1:
        return lora[0].a, lora[0].b
    a = torch.cat([f.a.view(experts, -1, f.a.shape[-1]) for f in lora], 1)
    b = torch.cat([f.b.view(f.b.shape[0], -1, experts) for f in lora], 1)
    return a.flatten(0, 1), b.flatten(1, 2)


def make_layer(weights: Sequence[PackedWeight], gate: Any, transposed: bool, dtype: Any) -> Any:
    """Return the `moe_layer.Layer` of two packed weights."""
    kernels = layer_kernels()
    first, second = (weight.aligned() for weight in weights)
    return kernels.Layer(first, second, transposed, kernels.Gate(*gate), dtype)


def check_devices(x: Tensor, *others: Tensor) -> None:
    """Raise where tensors lie on several devices: a kernel gets addresses only."""
    index = x.get_device()
    if any(t.get_device() != index for t in others):
        devices = ", ".join(sorted({str(t.device) for t in (x, *others)}))
        raise ValueError(f"an experts layer's tensors lie on several devices: {devices}.")


class _Work:
    def __init__(self, layer: Any, scalings: Sequence[float | None], biases: int) -> None:
        self.layer, self.scalings, self.biases = layer, scalings, biases
        self.state: Any = None  # returns the `moe_layer.ForwardState`, for the output


def _for_backward(layer: Any) -> Any:
    """Return the layer, or a callable that reads it again (offloaded or ZeRO-3 weights)."""
    first, second = layer.first.again, layer.second.again
    if first is None or second is None:
        return layer
    kind, constants = type(layer), layer[2:]  # Not the layer, which holds the weights
    return lambda: kind(first().aligned(), second().aligned(), *constants)


class _FusedLayer(torch.autograd.Function):
    """Computes the tensors that backward needs, and allocates the output."""

    # Non-reentrant checkpointing stops recomputing at the last saved tensor: since the caller
    # computes the output, the second projection is not recomputed.

    @staticmethod
    def forward(ctx: Any, work: _Work, index: Any, x: Tensor, weights: Any, *rest: Any) -> Tensor:
        n = work.biases
        operands = make_operands(x, weights, rest[:n], rest[n:], work.scalings)
        saved = take()
        if saved is None:
            with no_autocast(x):
                state = layer_kernels().gate_up_forward(work.layer, index, operands)
            saved = state.routing.ints, *state.saved
            keep(saved)
            work.state = lambda: state
        else:  # Only a layer that needs the output computes again what the output is made of
            gate_up, layer = layer_kernels().gate_up_forward, work.layer
            work.state = lambda: gate_up(layer, index, operands)
        ctx.work = _Work(_for_backward(work.layer), work.scalings, n)
        ctx.save_for_backward(x, weights, *rest, *saved)
        return torch.empty_like(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        work = ctx.work
        x, weights, *rest, ints, pre, products = ctx.saved_tensors
        n = work.biases
        operands = make_operands(x, weights, rest[:n], rest[n:], work.scalings)
        layer = work.layer() if callable(work.layer) else work.layer
        saved, needs_x = (ints, pre, products), ctx.needs_input_grad[2]
        grads = layer_backward(layer, operands, grad, saved, needs_x)
        return None, None, grads[0], grads[1], *[None] * n, *grads[2:]


def make_operands(x: Tensor, weights: Tensor, biases: Any, lora: Any, scalings: Any) -> Any:
    """Return the `moe_layer.Operands`; a projection without LoRA has the scaling None."""
    kernels, factors = layer_kernels(), iter(lora)
    make = kernels.Lora
    loras = [None if s is None else make(next(factors), next(factors), s) for s in scalings]
    return kernels.Operands(x, weights, biases or (None, None), loras)


def layer_backward(
    layer: Any, operands: Any, grad: Tensor, saved: Sequence[Tensor], needs_x: bool
) -> list[Tensor | None]:
    """Return the gradients of x and the routing weights, then of each LoRA factor."""
    kernels, weights = layer_kernels(), operands.weights
    with torch.no_grad(), no_autocast(grad):
        top_k = weights.shape[-1]
        routing = kernels.Routing(saved[0], weights.numel(), layer.first.experts, top_k)
        state = kernels.Saved(*saved[1:])
        grads = kernels.backward(layer, routing, state, grad, operands, needs_x=needs_x)
    factors = [g for g in (grads.a1, grads.b1, grads.a2, grads.b2) if g is not None]
    return [grads.x, grads.weights, *factors]


# The custom operator of compiled graphs, whose arguments are tensors and plain numbers.

_LAYER_CONSTANTS = (
    "int[] first, int[] second, str act, bool[] gate_flags, float[] gate_numbers, "
    "bool[] adapted, float[] scalings, bool transposed"
)
_LAYER_LISTS = "Tensor[] biases, Tensor[] lora, Tensor[] packed, "
_LAYER_FORWARD = (
    f"(Tensor x, Tensor weights, Tensor index, {_LAYER_LISTS}{_LAYER_CONSTANTS}) -> Tensor[]"
)
_LAYER_BACKWARD = (
    f"(Tensor grad, Tensor x, Tensor weights, {_LAYER_LISTS}Tensor[] saved, bool needs_x, "
    f"{_LAYER_CONSTANTS}) -> Tensor[]"
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
    ctx.counts, ctx.constants = (len(biases), len(lora), len(packed), 3), constants
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
    # torch treats an empty list among the constants as one of tensors
    none: list[Any] = [[] if value == [] else None for value in ctx.constants]
    first, second = (found[i] if need[i] else None for i in (0, 1))
    lists = [None] * len(biases), list(found[2:]), [None] * len(packed)
    return first, second, None, *lists, *none


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
