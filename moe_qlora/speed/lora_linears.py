"""Linear layers with one input and LoRA, as one operator: products are added where sums lie.

For layers i with frozen W_i and factors A_j, B_j, s_j of their adapters j:

    forward     z = x [A_1; A_2; ...]^T
                y_i = x W_i^T + bias_i, then y_i += s_j z_j B_j^T
    backward    dz_j = s_j g_i B_j
                dx = g_1 W_1, then dx += g_i W_i, then dx += dz [A_1; A_2; ...]
                dA = dz^T x, dB_j = s_j g_i^T z_j

A matrix product adds to what is in its output (beta = 1 of BLAS). Summed by themselves, y_i and dx
are written, read and written again: of q and o of Qwen3-30B-A3B with 16,384 tokens 2 x 0.13 ms, of
15.2 for a layer (H100).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import bitsandbytes
import torch
from torch import Tensor
from torch.nn.functional import linear

from ..experts.operators import no_grads, split
from ..experts.projection import first_order
from ..kernels.streams import SecondStream

_CONSTANTS = "int[] numbers, int[] owners, float[] scalings"
_FORWARD = f"(Tensor x, Tensor[] frozen, Tensor[] a, Tensor[] b, {_CONSTANTS}) -> Tensor[]"
_BACKWARD = (
    "(Tensor?[] grads, Tensor x, Tensor z, Tensor[] frozen, Tensor[] a, Tensor[] b, bool needs_x, "
    f"{_CONSTANTS}) -> Tensor[]"
)
_TYPES = bitsandbytes.functional.QuantState.valid_quant_types
"""Of packed codes, by their number in `Frozen.numbers`."""

_NUMBERS = 7
"""Of one layer in `Frozen.numbers`."""


class Frozen(NamedTuple):
    """A frozen layer as the operators take it, with a bias or without; made by `describe`."""

    tensors: list[Tensor]  # The weight, or its codes and statistics; then the bias
    numbers: list[int]  # What `_Layer` reads


def describe(weight: Tensor, bias: Tensor | None, state: Any = None) -> Frozen:
    """Describe a layer for the operators.

    Args:
        weight: `(out, in)`, or bitsandbytes' packed codes of it.
        bias: `(out,)`, in the dtype of the input.
        state: bitsandbytes' `QuantState` of packed codes, with the dtype of the input.
    """
    if state is None:
        tensors, packed, shape = [weight], [0, 0, 0], weight.shape
    else:
        tensors, shape = [weight, state.absmax, state.code], state.shape
        packed = [state.blocksize, 0, _TYPES.index(state.quant_type)]
        if state.nested:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
            packed[1] = state.state2.blocksize
    biases = [] if bias is None else [bias]
    tensors += biases
    return Frozen(tensors, [len(tensors), len(biases), *packed, *shape])


class _Layer:
    """What a `Frozen` describes."""

    def __init__(self, tensors: list[Tensor], numbers: Sequence[int]) -> None:
        _, biased, self.blocksize, self.nested, self.type, *self.shape = numbers
        self.bias = tensors.pop() if biased else None
        self.tensors = tensors

    def product(self, rows: Tensor) -> Tensor:
        """Return a new tensor: rows `(T, in)` times the weight, and the bias."""
        if not self.blocksize:
            return linear(rows, self.tensors[0], self.bias)
        y: Tensor = bitsandbytes.matmul_4bit(
            rows, self.tensors[0], self._state(rows.dtype), bias=self.bias
        )
        return y

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `(out, in)`."""
        if not self.blocksize:
            return self.tensors[0]
        codes, state = self.tensors[0].view(-1, 1), self._state(dtype)
        weight: Tensor = bitsandbytes.functional.dequantize_4bit(codes, state)
        return weight

    def _state(self, dtype: torch.dtype) -> Any:
        make, nested = bitsandbytes.functional.QuantState, {}
        _, absmax, code, *second = self.tensors
        if second:
            offset, absmax2, code2 = second
            state2 = make(absmax2, blocksize=self.nested, code=code2, dtype=torch.float32)
            nested = {"offset": offset, "state2": state2}
        return make(
            absmax, shape=torch.Size(self.shape), code=code, blocksize=self.blocksize,
            quant_type=_TYPES[self.type], dtype=dtype, **nested,
        )  # fmt: skip


def _layers(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[_Layer]:
    rest, layers = iter(tensors), []
    for first in range(0, len(numbers), _NUMBERS):
        own = numbers[first : first + _NUMBERS]
        layers.append(_Layer([next(rest) for _ in range(own[0])], own))
    return layers


class Adapted(NamedTuple):
    """Layers with the same input, and their adapters."""

    frozen: Sequence[Frozen]
    a: Sequence[Tensor]  # `(r, in)` of each adapter
    b: Sequence[Tensor]  # `(out, r)` of each adapter
    owners: Sequence[int]  # The layer of each adapter
    scalings: Sequence[float]


def compute(x: Tensor, layers: Adapted) -> list[Tensor]:
    """Return each layer's output `(..., out)` for x `(..., in)`; all tensors have one dtype.

    Gradients flow to x and the adapters. `register` has been called.
    """
    tensors = [tensor for each in layers.frozen for tensor in each.tensors]
    numbers = [number for each in layers.frozen for number in each.numbers]
    *outs, _ = torch.ops.moe_qlora.lora_linears(
        x, tensors, layers.a, layers.b, numbers, layers.owners, layers.scalings
    )
    return outs


def _parts(
    count: int, z: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], owners: Sequence[int],
    scalings: Sequence[float],
) -> list[list[tuple[int, Tensor, Tensor, float]]]:  # fmt: skip
    """Return for each of `count` layers its adapters: (place, columns of z, B, scaling)."""
    found: list[list[tuple[int, Tensor, Tensor, float]]] = [[] for _ in range(count)]
    columns = z.split([len(each) for each in a], 1)
    for place, (owner, part) in enumerate(zip(owners, columns, strict=True)):
        found[owner].append((place, part, b[place], scalings[place]))
    return found


def _forward(
    x: Tensor, frozen: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor],
    numbers: Sequence[int], owners: Sequence[int], scalings: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """Return the outputs, and z `(T, R)`."""
    with _without_autocast(x):
        rows, factors = x.reshape(-1, x.shape[-1]), _stacked(a)
        z, outs = rows.new_empty(len(rows), len(factors)), []
        layers, second = _layers(frozen, numbers), SecondStream(x.device, len(rows))
        with second.beside(factors):
            torch.mm(rows, factors.t(), out=z)
        parts = _parts(len(layers), z, a, b, owners, scalings)
        for layer, adapters in zip(layers, parts, strict=True):
            y = layer.product(rows)
            outs.append(y.view(*x.shape[:-1], y.shape[1]))
            with second.beside() if len(outs) < len(layers) else second.joined():
                for _, part, factor, scaling in adapters:
                    y.addmm_(part, factor.t(), alpha=scaling)
        return [*outs, z]


def _backward(
    grads: Sequence[Tensor | None], x: Tensor, z: Tensor, frozen: Sequence[Tensor],
    a: Sequence[Tensor], b: Sequence[Tensor], needs_x: bool, numbers: Sequence[int],
    owners: Sequence[int], scalings: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """Return dx, empty unless `needs_x`, the dA one below the other `(R, in)`, and each dB."""
    with _without_autocast(x):
        rows, factors = x.reshape(-1, x.shape[-1]), _stacked(a)
        dz, dx = torch.empty_like(z), None
        of_b = [torch.empty_like(factor) for factor in b]
        of_a = torch.empty_like(factors)
        layers, of_z = _layers(frozen, numbers), dz.split([len(each) for each in a], 1)
        parts = _parts(len(layers), z, a, b, owners, scalings)
        flat = [None if g is None else g.reshape(len(rows), g.shape[-1]) for g in grads]
        for grad, adapters in zip(flat, parts, strict=True):
            for place, _, factor, scaling in adapters:
                _product(of_z[place], grad, factor, scaling)
        second = SecondStream(x.device, len(rows))
        with second.beside():
            for grad, adapters in zip(flat, parts, strict=True):
                for place, part, _, scaling in adapters:
                    _product(of_b[place], None if grad is None else grad.t(), part, scaling)
            torch.mm(dz.t(), rows, out=of_a)
        for grad, layer in zip(flat, layers, strict=True):
            if needs_x and grad is not None:
                weight = layer.weight(x.dtype)
                dx = grad @ weight if dx is None else dx.addmm_(grad, weight)
        if needs_x:
            dx = dz @ factors if dx is None else dx.addmm_(dz, factors)
        second.join()
        return [x.new_empty(0) if dx is None else dx.view(x.shape), of_a, *of_b]


def _product(out: Tensor, a: Tensor | None, b: Tensor, scaling: float) -> None:
    """Write scaling a b to `out`, or zeros where a is None."""
    if a is None:
        out.zero_()
    else:
        torch.addmm(out, a, b, beta=0, alpha=scaling, out=out)


def _stacked(a: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(a)) if len(a) > 1 else a[0]


def _without_autocast(x: Tensor) -> Any:
    return torch.autocast(x.device.type, enabled=False)


def _forward_fake(
    x: Tensor, frozen: Any, a: Any, b: Any, numbers: Any, owners: Any, scalings: Any
) -> list[Tensor]:
    shape = x.shape[:-1]
    outs = [x.new_empty(*shape, features) for features in numbers[_NUMBERS - 2 :: _NUMBERS]]
    return [*outs, x.new_empty(shape.numel(), sum(each.shape[0] for each in a))]


def _backward_fake(
    grads: Any, x: Tensor, z: Tensor, frozen: Any, a: Any, b: Any, needs_x: bool, *constants: Any
) -> list[Tensor]:
    dx = x.new_empty(x.shape if needs_x else 0)
    of_a = x.new_empty(z.shape[1], x.shape[-1])
    return [dx, of_a, *(factor.new_empty(factor.shape) for factor in b)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    x, frozen, a, b, *constants = inputs
    ctx.counts, ctx.constants = (len(frozen), len(a)), constants
    ctx.save_for_backward(x, output[-1], *frozen, *a, *b)
    ctx.set_materialize_grads(False)


@first_order
def _autograd(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    x, z, *rest = ctx.saved_tensors
    frozen, a, b = split(rest, ctx.counts)
    dx, of_a, *of_b = torch.ops.moe_qlora.lora_linears_backward(
        list(grads[:-1]), x, z, frozen, a, b, ctx.needs_input_grad[0], *ctx.constants
    )
    of_each = list(of_a.split([len(each) for each in a]))
    dx = dx if ctx.needs_input_grad[0] else None
    return dx, [None] * len(frozen), of_each, of_b, *no_grads(ctx.constants)


def register() -> None:
    """Define the operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "lora_linears"):
        return
    # With the strides that a compiler chooses: else it copies gradients to those of eager code.
    tags = (torch.Tag.flexible_layout,)
    operator: Any = partial(torch.library.custom_op, mutates_args=(), tags=tags)
    forward = operator("moe_qlora::lora_linears", _forward, schema=_FORWARD)
    forward.register_fake(_forward_fake)
    forward.register_autograd(_autograd, setup_context=_setup)
    backward = operator("moe_qlora::lora_linears_backward", _backward, schema=_BACKWARD)
    backward.register_fake(_backward_fake)
