"""A whole experts module as one operation on a GPU: eager, and as a custom operator in graphs.

`run` computes a call by `kernels/moe_layer.py`; that these kernels suit it was decided before
(`backend.choose_backend`). `projection.py` is the reference for every result here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.weights import PackedWeight
from .activation import find_gate
from .backend import Call, layer_kernels
from .lora_source import LoraFactors
from .operands import PackedOperand
from .projection import no_autocast


class FusedCall(NamedTuple):
    """The tensors and constants of one call, but for the packed weights.

    Attributes:
        x: `(T, H)` in the dtype to compute in, contiguous.
        routing_weights: `(T, k)`, contiguous.
        index: `(T, k)`, contiguous: the top-k assignments.
        biases: Of both projections, or none.
        lora: a and b of each projection that has LoRA.
        scalings: By projection, None without LoRA.
        gate: Fields of `row_launches.Gate`.
        transposed: Whether weights are stored `(E, in, out)`.
        partial: Whether some assignments belong to no expert that is held here.
    """

    x: Tensor
    routing_weights: Tensor
    index: Tensor
    biases: list[Tensor]
    lora: list[Tensor]
    scalings: list[float | None]
    gate: tuple[Any, ...]
    transposed: bool
    partial: bool


def run(module: Any, call: Call, index: Tensor, routing_weights: Tensor) -> Tensor:
    """Return the module's output `(T, H)` in x's dtype, by the fused kernels.

    Args:
        module: The experts module.
        call: The call, for which `choose_backend` gave the fused layer.
        index: `(T, k)`.
        routing_weights: `(T, k)`.
    """
    x, dtype = call.x, call.autocast or call.x.dtype
    biases = [getattr(module, f"{name}_bias") for name in call.names] if module.has_bias else []
    lora: list[Tensor] = []
    scalings: list[float | None] = []
    for weight, factors in zip(call.weights, call.lora, strict=True):
        scalings.append(float(factors[0].scaling) if factors else None)
        lora += joined_lora(factors, cast(Any, weight).shape[0])
    fused = FusedCall(
        x.to(dtype).contiguous(), routing_weights.contiguous(), index.contiguous(), biases, lora,
        scalings, cast(Any, find_gate(module)), bool(module.is_transposed),
        bool(module._is_expert_parallel),
    )  # fmt: skip
    if torch.compiler.is_compiling():
        out = _compiled(fused, cast(Any, call.weights))
    else:
        out = _eager(fused, cast(Any, call.weights))
    return out if out.dtype == x.dtype else out.to(x.dtype)


def joined_lora(lora: Sequence[LoraFactors], experts: int) -> tuple[Tensor, ...]:
    """Return a and b of all adapters of one projection as one of all their ranks; () for none."""
    if not lora:
        return ()
    if len(lora) == 1:
        return lora[0].a, lora[0].b
    a = torch.cat([f.a.view(experts, -1, f.a.shape[-1]) for f in lora], 1)
    b = torch.cat([f.b.view(f.b.shape[0], -1, experts) for f in lora], 1)
    return a.flatten(0, 1), b.flatten(1, 2)


# Eager


def _eager(call: FusedCall, weights: Sequence[PackedWeight]) -> Tensor:
    check_devices(call.x, call.routing_weights, call.index, *call.biases, *call.lora)
    layer = make_layer(weights, call.gate, call.transposed, call.partial, call.x.dtype)
    work = _Work(layer, call.scalings, len(call.biases))
    out = _FusedLayer.apply(
        work, call.index, call.x, call.routing_weights, *call.biases, *call.lora
    )
    # A checkpoint's recomputation has left by now: backward has no need of what follows.
    with no_autocast(call.x):
        bias2 = call.biases[1] if call.biases else None
        layer_kernels().down_forward(
            layer, work.state, call.routing_weights, call.index, bias2, out
        )
    return cast(Tensor, out)


def make_layer(
    weights: Sequence[PackedWeight],
    gate: Sequence[Any],
    transposed: bool,
    partial: bool,
    dtype: torch.dtype,
) -> Any:
    """Return the `moe_layer.Layer` of two packed weights."""
    kernels = layer_kernels()
    first, second = (weight.aligned() for weight in weights)
    return kernels.Layer(first, second, transposed, partial, kernels.Gate(*gate), dtype)


def check_devices(x: Tensor, *others: Tensor) -> None:
    """Raise where tensors lie on several devices: a kernel knows addresses alone.

    Raises:
        ValueError: They do.
    """
    index = x.get_device()
    if any(t.get_device() != index for t in others):
        devices = ", ".join(sorted({str(t.device) for t in (x, *others)}))
        raise ValueError(f"an experts layer's tensors lie on several devices: {devices}.")


class _Work:
    """What a call hands through autograd, beside its tensors.

    Attributes:
        layer: The `moe_layer.Layer`.
        scalings: By projection.
        biases: How many.
        state: The `moe_layer.ForwardState`, until the output is there.
    """

    def __init__(self, layer: Any, scalings: Sequence[float | None], biases: int) -> None:
        self.layer, self.scalings, self.biases = layer, scalings, biases
        self.state: Any = None


class _FusedLayer(torch.autograd.Function):
    """Computes all that backward needs, and gives room for the output.

    Recomputing, non-reentrant checkpointing stops as soon as it has what was saved: with the output
    left to the caller, the second projection is not computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, work: _Work, index: Tensor, x: Tensor, weights: Tensor, *rest: Tensor
    ) -> Tensor:
        n = work.biases
        with no_autocast(x):
            bias1 = rest[0] if n else None
            state = layer_kernels().gate_up_forward(
                work.layer, index, x, bias1, *make_loras(rest[n:], work.scalings)
            )
        work.state = state
        ctx.work, ctx.rest = _Work(work.layer, work.scalings, n), _SavedTensors(rest)
        others = [t for t in rest if not _is_leaf(t)]
        ctx.save_for_backward(x, weights, *others, state.routing.ints, *state.saved)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        work = ctx.work
        x, weights, *others, ints, pre, products = ctx.saved_tensors
        rest = ctx.rest.all(others)
        grads = layer_backward(
            work.layer, work.scalings, grad, x, weights, rest[: work.biases],
            rest[work.biases :], (ints, pre, products), ctx.needs_input_grad[2],
        )  # fmt: skip
        return None, None, grads[0], grads[1], *[None] * work.biases, *grads[2:]


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.is_leaf and not tensor.is_inference()


class _SavedTensors:
    """Tensors for backward: leaves as they are, since what saves them costs 10 us for each.

    Under non-reentrant checkpointing, that is: every saved tensor goes through three hooks. What is
    not a leaf is for autograd to save, and not held here: a checkpoint is to free it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.leaves = [(t, t._version) if _is_leaf(t) else None for t in tensors]

    def all(self, others: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in their order.

        Args:
            others: Those that are not leaves, as autograd gives them back.

        Raises:
            RuntimeError: A leaf was changed since.
        """
        rest = iter(others)
        tensors = []
        for leaf in self.leaves:
            if leaf is not None and leaf[0]._version != leaf[1]:
                raise RuntimeError(
                    "a LoRA weight or bias of the experts was changed in place between forward "
                    "and backward: step the optimizer after the backward."
                )
            tensors.append(next(rest) if leaf is None else leaf[0])
        return tensors


def make_loras(lora: Sequence[Tensor], scalings: Sequence[float | None]) -> list[Any]:
    """Return the `moe_layer.Lora` of each projection, None for one without."""
    factors = iter(lora)
    make = layer_kernels().Lora
    return [None if s is None else make(next(factors), next(factors), s) for s in scalings]


def layer_backward(
    layer: Any,
    scalings: Sequence[float | None],
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    biases: Sequence[Tensor],
    lora: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs_x: bool,
) -> list[Tensor | None]:
    """Return the gradients of x and the routing weights, then of each LoRA factor."""
    kernels = layer_kernels()
    with torch.no_grad(), no_autocast(x):
        routing = kernels.routing_of(saved[0], weights.shape, layer.first.experts)
        grads = kernels.backward(
            layer, routing, kernels.Saved(*saved[1:]), grad, x, weights,
            *(biases or (None, None)), *make_loras(lora, scalings), needs_x=needs_x,
        )  # fmt: skip
    factors = [g for g in (grads.a1, grads.b1, grads.a2, grads.b2) if g is not None]
    return [grads.x, grads.weights, *factors]


# Under torch.compile


def _compiled(call: FusedCall, weights: Sequence[PackedOperand]) -> Tensor:
    act, gated, interleaved, limit, alpha, shift = call.gate
    out: Tensor = torch.ops.moe_qlora.experts_layer(
        call.x,
        call.routing_weights,
        call.index,
        call.biases,
        call.lora,
        [tensor for weight in weights for tensor in weight.tensors],
        weights[0].numbers,
        weights[1].numbers,
        act,
        [gated, interleaved],
        [alpha, shift, *(() if limit is None else (limit,))],
        [scaling is not None for scaling in call.scalings],
        [scaling for scaling in call.scalings if scaling is not None],
        call.transposed,
        call.partial,
    )[0]
    return out


__all__ = [
    "FusedCall",
    "check_devices",
    "joined_lora",
    "layer_backward",
    "make_layer",
    "make_loras",
    "run",
]
