"""A whole experts module as one operation on a GPU: which modules suit, eager and compiled.

`run` computes what `experts.experts_forward` computes, by the kernels of `kernels/layer.py`, where
everything about the call suits these; it gives None otherwise, and the projections then run one by
one (`experts_op.py`), which is the reference for every result here.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import storage
from .experts_gate import find_gate
from .experts_op import no_autocast, packed_inputs
from .kernels.packed import Packed, padded, tile_counts, tile_rows

_MAX_RANK = 128


_usable: dict[int, bool] = {}
"""By CUDA device: whether the kernels run there. Filled where a compiler is not looking on."""


@cache
def _kernels() -> Any:
    """`kernels.layer`, None where Triton is not installed."""
    try:
        from .kernels import layer
    except ImportError:
        return None
    return layer


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
    """One call, as the operators take it: lists of tensors, and constants.

    The custom operators, which the compiler sees, take the constants as a string.
    """

    x: Tensor
    weights: Tensor
    choices: Tensor
    biases: list[Tensor]
    lora: list[Tensor]
    packed: list[Tensor]
    constants: tuple[Any, ...]


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
        terms: The `LoraTerm`s of the first projection and of the second.
        autocast: The autocast dtype, None outside autocast.
    """
    if not available(x.device) or x.numel() == 0 or module.has_post_expert_norm:
        return None
    names = (first_name, "down_proj")
    if not all(storage.is_packed(module, name) for name in names):
        return None
    call = _call(module, names, x, index, weights, terms, autocast)
    if call is None:
        return None
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.moe_qlora.experts_layer(
            call.x, call.weights, call.choices, call.biases, call.lora, call.packed,
            repr(call.constants),
        )[0]  # fmt: skip
    else:
        made = _layer(call.packed, call.constants)
        n = len(call.biases), len(call.lora)
        out = _Layer.apply(made, n, call.choices, call.x, call.weights, *call.biases, *call.lora)
    return out.to(x.dtype)


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
    packed: list[Tensor] = []
    stacks = []
    for name in names:
        tensors, constants = _stack_parts(module, name)
        compute = constants[-1]
        if len(constants[1]) != 3 or (compute not in ("", str(dtype)) and autocast is None):
            return None
        packed += tensors
        stacks.append((len(tensors), *constants[:-1]))
    experts = stacks[0][2][0]
    lora: list[Tensor] = []
    scalings: list[float | None] = []
    for projection in terms:
        factors = _one_term(projection, experts, dtype, autocast)
        if factors is None:
            return None
        scalings.append(factors[2] if factors else None)
        lora += factors[:2]
    if not _fits(packed, stacks, x.device):
        return None
    constants = (
        gate, stacks, scalings, bool(module.is_transposed), bool(module._is_expert_parallel),
        str(dtype),
    )  # fmt: skip
    cast = x.to(dtype).contiguous()
    return _Call(cast, weights.contiguous(), index.contiguous(), biases, lora, packed, constants)


def _stack_parts(module: Any, name: str) -> tuple[list[Tensor], Any]:
    """A packed parameter as tensors and constants."""
    if not torch.compiler.is_compiling():
        storage.read_packed(module, name)  # checks the codes, and has the statistics follow them
    tensors, (kind, shape, _, blocksize, nested, compute) = packed_inputs(module, name)
    dtype = f"torch.{compute}" if compute else ""
    return tensors, (kind, tuple(shape), blocksize, nested, dtype)


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
    if sum(ranks) > _MAX_RANK:
        return None
    if len(terms) == 1:
        return terms[0].a, terms[0].b, terms[0].scaling
    a = torch.cat([t.a.view(experts, r, -1) for t, r in zip(terms, ranks, strict=True)], 1)
    b = torch.cat([t.b.view(-1, r, experts) for t, r in zip(terms, ranks, strict=True)], 1)
    return a.flatten(0, 1), b.flatten(1, 2), terms[0].scaling


def _packed_stack(tensors: Sequence[Tensor], stack: tuple[Any, ...]) -> Packed:
    _, kind, shape, blocksize, nested = stack
    if kind == "int8":
        scales = tensors[1].view(torch.float32)
        return Packed(tensors[0].detach().view(-1), scales, None, 0, None, shape, kind)
    codes = tensors[0].detach().view(-1).view(torch.uint8)
    if codes.data_ptr() % 16:  # a view into something larger; the kernels read whole words
        codes = codes.clone()
    second = (tensors[4], tensors[5], tensors[3]) if nested else None
    inner = (second[1], second[0], second[2], nested) if second is not None else None
    return Packed(codes, tensors[1], tensors[2], blocksize, inner, shape, kind)


_Made = tuple[Any, list[float | None]]


def _layer(packed: Sequence[Tensor], constants: tuple[Any, ...]) -> _Made:
    """`kernels.layer.Layer` and the scalings of `_Call.packed` and `constants`."""
    kernels = _kernels()
    gate, stacks, scalings, transposed, partial, dtype = constants
    count = stacks[0][0]
    first, second = (
        _packed_stack(part, stack)
        for part, stack in zip((packed[:count], packed[count:]), stacks, strict=True)
    )
    layer = kernels.Layer(
        first, second, transposed, partial, kernels.Gate(*gate),
        getattr(torch, dtype.removeprefix("torch.")),
    )  # fmt: skip
    return layer, scalings


@cache
def _literal(constants: str) -> Any:
    return ast.literal_eval(constants)


def _fits(packed: Sequence[Tensor], stacks: Sequence[Any], device: torch.device) -> bool:
    """Whether sizes are whole groups of 8, and all is plain and on the device that computes."""
    wide = all(size % 8 == 0 for stack in stacks for size in stack[2][1:])
    whole = all(s[1] == "int8" or (s[3] >= 8 and s[3] & (s[3] - 1) == 0) for s in stacks)
    few = all(stack[2][0] < 2**15 - 1 for stack in stacks)
    plain = all(t.device == device and not hasattr(t, "device_mesh") for t in packed)
    return wide and whole and few and plain


# Eager and compiled


def _forward(
    made: _Made,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    biases: Sequence[Tensor],
    lora: Sequence[Tensor],
) -> list[Tensor]:
    """The output, then what backward needs: routing (5), pre-activation and LoRA products (3)."""
    kernels = _kernels()
    layer, scalings = made
    with torch.no_grad(), no_autocast(x):
        routing = kernels.route(index, layer.first.experts)
        lora1, lora2 = _loras(lora, scalings)
        out, saved = kernels.forward(
            layer, routing, x, weights, index, *(biases or (None, None)), lora1, lora2
        )
    return [out, *routing[:5], *saved]


def _loras(lora: Sequence[Tensor], scalings: Sequence[float | None]) -> list[Any]:
    given = iter(lora)
    make = _kernels().Lora
    return [None if s is None else make(next(given), next(given), s) for s in scalings]


def _backward(
    made: _Made,
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
    layer, scalings = made
    with torch.no_grad(), no_autocast(x):
        routing = kernels.routing_of(saved[:5], weights.shape, layer.first.experts)
        lora1, lora2 = _loras(lora, scalings)
        grads = kernels.backward(
            layer, routing, kernels.Saved(*saved[5:]), grad, x, weights,
            *(biases or (None, None)), lora1, lora2, needs_x=needs_x,
        )  # fmt: skip
    factors = [g for g in (grads.a1, grads.b1, grads.a2, grads.b2) if g is not None]
    return [grads.x, grads.weights, *factors]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, made: _Made, n: Any, index: Tensor, x: Tensor, weights: Tensor, *rest: Tensor
    ) -> Tensor:
        out, *saved = _forward(made, x, weights, index, rest[: n[0]], rest[n[0] :])
        ctx.made, ctx.n = made, n
        ctx.save_for_backward(x, weights, *rest, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        biases, factors = ctx.n
        x, weights, *rest = ctx.saved_tensors
        end = biases + factors
        grads = _backward(
            ctx.made, grad, x, weights, rest[:biases], rest[biases:end], rest[end:],
            ctx.needs_input_grad[3],
        )  # fmt: skip
        return (None,) * 3 + (grads[0], grads[1], *[None] * biases, *grads[2:])


def _forward_op(
    x: Tensor, weights: Tensor, index: Tensor, biases: Any, lora: Any, packed: Any, constants: str
) -> list[Tensor]:
    return _forward(_layer(packed, _literal(constants)), x, weights, index, biases, lora)


def _forward_fake(
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    biases: Sequence[Tensor],
    lora: Sequence[Tensor],
    packed: Sequence[Tensor],
    constants: str,
) -> list[Tensor]:
    _, stacks, scalings, transposed, *_ = _literal(constants)
    experts, rows, cols = stacks[0][2]
    width = cols if transposed else rows
    count = index.numel()
    given = iter(lora)
    ranks = []
    for scaling in scalings:
        ranks.append(0 if scaling is None else padded(next(given).shape[0] // experts))
        if scaling is not None:
            next(given)
    return [
        torch.empty_like(x),
        index.new_empty(count, dtype=torch.int32),
        index.new_empty(count, dtype=torch.int32),
        index.new_empty(experts + 1, dtype=torch.int32),
        *(
            index.new_empty(n, 2, dtype=torch.int32)
            for n in tile_counts(count, experts, tile_rows(count, experts))
        ),
        x.new_empty(count, width),
        x.new_empty(count, ranks[0]),
        x.new_empty(count, ranks[1]),
    ]


def _backward_op(
    grad: Tensor, x: Tensor, weights: Tensor, biases: Any, lora: Any, packed: Any,
    saved: Any, constants: str, needs_x: bool,
) -> list[Tensor]:  # fmt: skip
    made = _layer(packed, _literal(constants))
    grads = _backward(made, grad, x, weights, biases, lora, saved, needs_x)
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


__all__ = ["available", "prepare", "register_operators", "run"]
