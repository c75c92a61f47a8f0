"""A whole experts module as one operation on a GPU: which modules suit, eager and compiled.

`run` computes what `experts.experts_forward` computes, by the kernels of
`kernels/moe_layer.py`, where
everything about the call suits these; it gives None otherwise, and the projections then run one by
one (`experts/projection.py`), which is the reference for every result here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.limits import MAX_EXPERTS, MAX_LORA_RANK
from ..kernels.weights import PackedWeight, WeightSpec
from ..packing import parametrize
from .activation import find_gate
from .projection import no_autocast, packed_inputs

_usable: dict[int, bool] = {}
"""By CUDA device: whether the kernels run there. Filled where a compiler is not looking on."""


@cache
def _kernels() -> Any:
    """`kernels.layer`, None where Triton is not installed."""
    try:
        from ..kernels import moe_layer
    except ImportError:
        return None
    return moe_layer


def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: CUDA, compute capability 8.0 or more, and Triton."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    index = device.index or 0
    if index not in _usable:
        if torch.compiler.is_compiling():
            return False
        kernels = _kernels()
        _usable[index] = kernels is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        if _usable[index]:
            kernels.prepare(device)
    return _usable[index]


def prepare(module: Any) -> None:
    """Find out, outside of any compiler, what a compiled call of this module must know."""
    find_gate(module)
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        available(parameter.device)


# What of a call suits


class _Call(NamedTuple):
    """One call, but for the stacks.

    Attributes:
        x: `(T, H)` in `dtype`, contiguous.
        weights: `(T, k)`, contiguous.
        choices: `(T, k)`, contiguous: the index.
        biases: Of both projections, or none.
        lora: a and b of each projection that has LoRA.
        scalings: By projection, None without LoRA.
        gate: Fields of `kernels.layer.Gate`.
        transposed: Whether stacks are stored `(E, in, out)`.
        partial: Whether some choices belong to no expert that is held here.
        dtype: In which to compute.
    """

    x: Tensor
    weights: Tensor
    choices: Tensor
    biases: list[Tensor]
    lora: list[Tensor]
    scalings: list[float | None]
    gate: tuple[Any, ...]
    transposed: bool
    partial: bool
    dtype: torch.dtype


def run(
    module: Any,
    first_name: str,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    terms: Sequence[Sequence[Any]],
    autocast: torch.dtype | None,
) -> Tensor | None:
    """The module's output by the fused kernels; None where they do not suit.

    Args:
        module: The experts module.
        first_name: Its first projection: "gate_up_proj" or "up_proj".
        x: `(T, H)`.
        index: `(T, k)`.
        weights: `(T, k)`.
        terms: The `LoraFactors`s of the first projection and of the second.
        autocast: The autocast dtype, None outside autocast.
    """
    if not available(x.device) or x.numel() == 0 or module.has_post_expert_norm:
        return None
    names = (first_name, "down_proj")
    if not all(parametrize.is_packed(module, name) for name in names):
        return None
    call = _call(module, names, x, index, weights, terms, autocast)
    if call is None:
        return None
    run = _compiled if torch.compiler.is_compiling() else _eager
    out = run(module, names, call, autocast)
    return out if out is None or out.dtype == x.dtype else out.to(x.dtype)


def _call(
    module: Any,
    names: tuple[str, str],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    terms: Sequence[Sequence[Any]],
    autocast: torch.dtype | None,
) -> _Call | None:
    gate = find_gate(module)
    dtype = autocast or x.dtype
    if gate is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    biases = [getattr(module, f"{name}_bias") for name in names] if module.has_bias else []
    if any(bias.requires_grad for bias in biases):
        return None
    experts = parametrize.packed_shape(module, names[0])[0]
    lora: list[Tensor] = []
    scalings: list[float | None] = []
    for projection in terms:
        factors = _one_term(projection, experts, dtype, autocast)
        if factors is None:
            return None
        scalings.append(factors[2] if factors else None)
        lora += factors[:2]
    return _Call(
        x.to(dtype).contiguous(), weights.contiguous(), index.contiguous(), biases, lora, scalings,
        gate, bool(module.is_transposed), bool(module._is_expert_parallel), dtype,
    )  # fmt: skip


def _one_term(
    terms: Sequence[Any], experts: int, dtype: torch.dtype, autocast: torch.dtype | None
) -> tuple[Any, ...] | None:
    """The terms as one of all their ranks: (a, b, scaling); () for none, None if they differ.

    float32 factors are multiplied in 16 bit, as under autocast, and get float32 gradients: stock
    PEFT rounds the sum of weight and delta to 16 bit, which loses more.
    """
    if not terms:
        return ()
    for term in terms:
        dropped = term.dropout is not None and term.dropout.training
        if (
            dropped
            or term.scaling != terms[0].scaling
            or (autocast is None and term.a.dtype not in (dtype, torch.float32))
        ):
            return None
    ranks = [term.a.shape[0] // experts for term in terms]
    if sum(ranks) > MAX_LORA_RANK:
        return None
    if len(terms) == 1:
        return terms[0].a, terms[0].b, float(terms[0].scaling)
    a = torch.cat([t.a.view(experts, r, -1) for t, r in zip(terms, ranks, strict=True)], 1)
    b = torch.cat([t.b.view(-1, r, experts) for t, r in zip(terms, ranks, strict=True)], 1)
    return a.flatten(0, 1), b.flatten(1, 2), float(terms[0].scaling)


@lru_cache(maxsize=256)
def _fits(form: WeightSpec) -> bool:
    """Whether sizes are whole groups of 8, and experts as few as the kernels can sort by."""
    experts, *sizes = form.shape
    whole = form.kind == "int8" or (
        form.blocksize >= 8 and form.blocksize & (form.blocksize - 1) == 0
    )
    return whole and experts <= MAX_EXPERTS and all(size % 8 == 0 for size in sizes)


def _computes(wanted: torch.dtype | None, call: _Call, autocast: torch.dtype | None) -> bool:
    return wanted in (None, call.dtype) or autocast is not None


# Eager


def _eager(
    module: Any, names: tuple[str, str], call: _Call, autocast: torch.dtype | None
) -> Tensor | None:
    packed = []
    for name in names:
        stack = parametrize.read_packed(module, name)
        if len(stack.shape) != 3 or not _computes(stack.compute_dtype, call, autocast):
            return None
        codes = stack.flat_codes
        plain = type(codes) is Tensor and codes.device == call.x.device
        if not (plain and _fits(stack.spec)):
            return None
        packed.append(stack)
    _check_devices(call.x, call.weights, call.choices, *call.biases, *call.lora)
    work = _Work(_layer(packed, call), call.scalings, len(call.biases))
    out = _Layer.apply(work, call.choices, call.x, call.weights, *call.biases, *call.lora)
    # A checkpoint's recomputation has left by now: what follows, backward has no need of.
    with no_autocast(call.x):
        bias2 = call.biases[1] if call.biases else None
        _kernels().finish(work.layer, work.begun, call.weights, call.choices, bias2, out)
    return cast(Tensor, out)


def _layer(packed: Sequence[PackedWeight], call: Any) -> Any:
    """`kernels.layer.Layer`."""
    kernels = _kernels()
    first, second = (p.aligned() for p in packed)
    gate = kernels.Gate(*call.gate)
    return kernels.Layer(first, second, call.transposed, call.partial, gate, call.dtype)


def _check_devices(x: Tensor, *others: Tensor) -> None:
    """A kernel knows addresses alone.

    Raises:
        ValueError: The tensors lie on several devices.
    """
    index = x.get_device()
    if any(t.get_device() != index for t in others):
        found = ", ".join(sorted({str(t.device) for t in (x, *others)}))
        raise ValueError(f"an experts layer's tensors lie on several devices: {found}.")


class _Work:
    """What a call hands through autograd, beside its tensors.

    Attributes:
        layer: `kernels.layer.Layer`.
        scalings: By projection.
        biases: How many.
        begun: `kernels.layer.Begun`, until the output is there.
    """

    def __init__(self, layer: Any, scalings: Sequence[float | None], biases: int) -> None:
        self.layer, self.scalings, self.biases = layer, scalings, biases
        self.begun: Any = None


class _Layer(torch.autograd.Function):
    """Computes all that backward needs, and gives room for the output.

    Recomputing, non-reentrant checkpointing stops as soon as it has what was saved: with the output
    left to the caller, the second product is not computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, work: _Work, index: Tensor, x: Tensor, weights: Tensor, *rest: Tensor
    ) -> Tensor:
        kernels = _kernels()
        n = work.biases
        with no_autocast(x):
            bias1 = rest[0] if n else None
            begun = kernels.begin(work.layer, index, x, bias1, *_loras(rest[n:], work.scalings))
        work.begun = begun
        ctx.work, ctx.held = _Work(work.layer, work.scalings, n), _Held(rest)
        others = [t for t in rest if not _is_leaf(t)]
        ctx.save_for_backward(x, weights, *others, begun.routing.ints, *begun.saved)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        work = ctx.work
        x, weights, *others, ints, pre, products = ctx.saved_tensors
        rest = ctx.held.all(others)
        grads = _backward(
            work.layer, work.scalings, grad, x, weights, rest[: work.biases],
            rest[work.biases :], (ints, pre, products), ctx.needs_input_grad[2],
        )  # fmt: skip
        return None, None, grads[0], grads[1], *[None] * work.biases, *grads[2:]


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.is_leaf and not tensor.is_inference()


class _Held:
    """Tensors for backward: leaves as they are, since what saves them costs 10 us for each.

    Under non-reentrant checkpointing, that is: every saved tensor goes through three hooks. What is
    no leaf is for autograd to save, and not held here: a checkpoint is to free it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.leaves = [(t, t._version) if _is_leaf(t) else None for t in tensors]

    def all(self, others: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in their order.

        Args:
            others: Those that are no leaves, as autograd gives them back.

        Raises:
            RuntimeError: A leaf was changed since.
        """
        given = iter(others)
        found = []
        for leaf in self.leaves:
            if leaf is not None and leaf[0]._version != leaf[1]:
                raise RuntimeError(
                    "a LoRA weight or bias of the experts was changed in place between forward "
                    "and backward: step the optimizer after the backward."
                )
            found.append(next(given) if leaf is None else leaf[0])
        return found


def _loras(lora: Sequence[Tensor], scalings: Sequence[float | None]) -> list[Any]:
    given = iter(lora)
    make = _kernels().Lora
    return [None if s is None else make(next(given), next(given), s) for s in scalings]


def _backward(
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
    """Gradients of x and weights, then of each LoRA factor."""
    kernels = _kernels()
    with torch.no_grad(), no_autocast(x):
        routing = kernels.routing_of(saved[0], weights.shape, layer.first.experts)
        grads = kernels.backward(
            layer, routing, kernels.Saved(*saved[1:]), grad, x, weights,
            *(biases or (None, None)), *_loras(lora, scalings), needs_x=needs_x,
        )  # fmt: skip
    factors = [g for g in (grads.a1, grads.b1, grads.a2, grads.b2) if g is not None]
    return [grads.x, grads.weights, *factors]


def _compiled(
    module: Any, names: tuple[str, str], call: _Call, autocast: torch.dtype | None
) -> Tensor | None:
    packed: list[Tensor] = []
    stacks = []
    for name in names:
        tensors, (kind, shape, _, blocksize, nested, compute) = packed_inputs(module, name)
        wanted = getattr(torch, compute) if compute else None
        if len(shape) != 3 or not _computes(wanted, call, autocast):
            return None
        plain = all(t.device == call.x.device and not hasattr(t, "device_mesh") for t in tensors)
        if not plain or not _fits.__wrapped__(
            WeightSpec(tuple(shape), kind, blocksize, nested, -1)
        ):
            return None
        packed += tensors
        stacks.append((len(tensors), kind, tuple(shape), blocksize, nested))
    constants = (
        call.gate, stacks, call.scalings, call.transposed, call.partial, str(call.dtype)
    )  # fmt: skip
    out: Tensor = torch.ops.moe_qlora.experts_layer(
        call.x, call.weights, call.choices, call.biases, call.lora, packed, repr(constants)
    )[0]
    return out


__all__ = [
    "available",
    "prepare",
    "run",
]
