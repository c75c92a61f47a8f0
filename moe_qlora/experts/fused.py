"""A whole experts module as one operation on a GPU: eager, and as a custom operator in graphs.

`run` computes a call by `kernels/moe_layer.py`, for calls that `backend.choose_backend` gives it.
`projection.py` is the reference for every result here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.weights import PackedWeight
from .backend import Call, find_gate, layer_kernels, stored_transposed
from .kept import keep, take
from .operands import LoraFactors
from .projection import first_order, no_autocast


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


def make_layer(
    weights: Sequence[PackedWeight], gate: Sequence[Any], transposed: bool, dtype: torch.dtype
) -> Any:
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
    """Return the layer; a function that returns it where its weights must be read again."""
    first, second = layer.first.again, layer.second.again
    if first is None or second is None:
        return layer
    kind, constants = type(layer), layer[2:]  # Not the layer: it would keep what it has read
    return lambda: kind(first().aligned(), second().aligned(), *constants)


class _FusedLayer(torch.autograd.Function):
    """Computes the tensors that backward needs, and allocates the output.

    Non-reentrant checkpointing stops recomputing at the last saved tensor: since the caller
    computes the output, the second projection is not recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, work: _Work, index: Tensor, x: Tensor, weights: Tensor, *rest: Tensor
    ) -> Tensor:
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
        operands = make_operands(
            x, weights, rest[: work.biases], rest[work.biases :], work.scalings
        )
        saved = ints, pre, products
        layer = work.layer() if callable(work.layer) else work.layer
        grads = layer_backward(layer, operands, grad, saved, ctx.needs_input_grad[2])
        return None, None, grads[0], grads[1], *[None] * work.biases, *grads[2:]


def make_operands(
    x: Tensor,
    weights: Tensor,
    biases: Sequence[Tensor],
    lora: Sequence[Tensor],
    scalings: Sequence[float | None],
) -> Any:
    """Return the `moe_layer.Operands`; a projection's scaling is None where it has no LoRA."""
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
