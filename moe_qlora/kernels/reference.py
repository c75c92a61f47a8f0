"""One projection of a layer's experts over sorted tokens, forward and backward, on any device.

Shape legend: T tokens, k assignments a token, R = T k rows (one for each top-k assignment, sorted
by expert), E experts, r rank.

For row i of expert e:  y_i = x_i W_e^T + b_e + sum_j s_j (d_j(x_i) A_je^T) B_je^T,  times scale_i
where there is one. The weights come from `decode`, one expert at a time and only for experts that
have rows, so that nothing of the size of a layer is ever there. No gradient for W is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Decode = Callable[[int, int], Tensor]
"""[first, last) -> `(last - first, ...)` matrices of these experts as stored, to compute with."""


@dataclass(frozen=True)
class Rows:
    """Where each sorted row comes from and goes to."""

    order: Tensor  # `(R,)` int64: the assignment (token x k + slot) in each sorted row
    # `(E + 1,)`: rows [offsets[e], offsets[e + 1]) belong to expert e. Rows after the last offset
    # belong to no expert that is held here
    expert_offsets: Tensor
    top_k: int
    gathers: bool  # Whether the input holds tokens, else sorted rows
    scatters: bool  # Whether the output is summed to tokens, else sorted rows
    partial: bool  # Whether there may be rows after the last offset

    @cached_property
    def token(self) -> Tensor:
        """`(R,)` token of each sorted row."""
        return self.order // self.top_k

    @cached_property
    def inverse(self) -> Tensor:
        """`(R,)` sorted row of each assignment."""
        places = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.empty_like(self.order).index_copy_(0, self.order, places)

    @property
    def gather(self) -> Tensor | None:
        """Token that each row reads; None where it reads its own input row."""
        return self.token if self.gathers else None

    @property
    def scatter(self) -> Tensor | None:
        """Token that each row is added to; None where it is its own output row."""
        return self.token if self.scatters else None

    @property
    def outputs(self) -> int:
        """Number of output rows."""
        return self.order.shape[0] // (self.top_k if self.scatters else 1)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, one past its last) of each expert with rows; waits for the device."""
        for expert, (low, high) in enumerate(pairwise(self.expert_offsets.tolist())):
            if high > low:
                yield expert, low, high


@dataclass(frozen=True)
class LoraInputs:
    """One LoRA adapter's inputs to a projection."""

    # x after the adapter's dropout, which it reads instead of x; None where it reads x
    dropped: Tensor | None
    a: Tensor  # `(E r, in)`, expert slowest
    b: Tensor  # `(out, r E)`, expert fastest
    scaling: float
    dtype: torch.dtype  # Dtype to compute it in

    def factors(self, experts: int) -> tuple[Tensor, Tensor]:
        """`(E, r, in)` and `(out, r, E)` views."""
        a = self.a.reshape(experts, -1, self.a.shape[-1])
        return a, self.b.reshape(self.b.shape[0], -1, experts)


@dataclass(frozen=True)
class Weight:
    """One projection's weight, as this module sees it."""

    decode: Decode  # Gives experts' matrices
    experts: int  # E
    out_features: int  # Rows of the matrix as applied
    transposed: bool  # Whether it is stored `(in, out)`
    dtype: torch.dtype  # Dtype to compute in


class Operands(NamedTuple):
    """What one projection is computed from."""

    x: Tensor  # `(N, in)`
    weight: Weight
    rows: Rows
    scale: Tensor | None  # `(R,)` factors of the rows, None for 1
    bias: Tensor | None  # `(E, out)`, or None
    lora: Sequence[LoraInputs]


@dataclass
class Grads:
    """What `backward` computes; None where it was not needed."""

    x: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    dropped: list[Tensor | None]
    a: list[Tensor | None]
    b: list[Tensor | None]


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    x: bool
    scale: bool
    bias: bool
    dropped: Sequence[bool]
    a: Sequence[bool]
    b: Sequence[bool]


def _take(tensor: Tensor, index: Tensor | None, low: int, high: int) -> Tensor:
    return tensor[low:high] if index is None else tensor.index_select(0, index[low:high])


def _add(target: Tensor, value: Tensor, index: Tensor | None, low: int, high: int) -> None:
    # A token has an expert once at most, so no row is added twice in one call, and calls come in
    # the experts' order: the same sum in the same order every time, without atomics' freedom.
    if index is None:
        target[low:high] += value.to(target.dtype)
    else:
        target.index_add_(0, index[low:high], value.to(target.dtype))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_expert(
    adapter: LoraInputs, operands: Operands, read: Tensor, expert: int, low: int, high: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what an adapter reads of rows [low, high), and its `(r, in)` and `(out, r)`."""
    dtype = adapter.dtype
    if adapter.dropped is not None:
        read = _take(adapter.dropped, operands.rows.gather, low, high)
    a, b = adapter.factors(operands.weight.experts)
    return read.to(dtype), a[expert].to(dtype), b[:, :, expert].to(dtype)


def forward(operands: Operands) -> Tensor:
    """Return the projection of x, `(rows.outputs, out)` in x's dtype, summed in fp32 or finer."""
    x, weight, rows, scale, bias, lora = operands
    dtype = x.dtype if rows.scatter is None else _sum_dtype(x.dtype)
    out = torch.zeros(rows.outputs, weight.out_features, dtype=dtype, device=x.device)
    for expert, low, high in rows.spans():
        matrix = weight.decode(expert, expert + 1)[0]
        read = _take(x, rows.gather, low, high)
        y = read.to(weight.dtype) @ (matrix if weight.transposed else matrix.t())
        if bias is not None:
            y = y + bias[expert].to(y.dtype)
        y = y.to(x.dtype)
        for adapter in lora:
            source, a, b = _of_expert(adapter, operands, read, expert, low, high)
            y = y + ((source @ a.t()) @ b.t()) * adapter.scaling
        if scale is not None:
            y = y * scale[low:high, None]
        _add(out, y, rows.scatter, low, high)
    return out.to(x.dtype)


def backward(grad: Tensor, operands: Operands, needs: Needs) -> Grads:
    """Return the gradients of `forward`, which keeps nothing; `grad` is `(rows.outputs, out)`."""
    x, weight, rows, scale, bias, lora = operands
    wide = _sum_dtype(x.dtype)
    grads = _zero_grads(operands, needs)
    wants_base = needs.x or (needs.scale and scale is not None)
    for expert, low, high in rows.spans():
        g = _take(grad, rows.scatter, low, high)
        factor = None if scale is None else scale[low:high, None]
        scaled = g if factor is None else g * factor
        read = _take(x, rows.gather, low, high)
        dot = None if grads.scale is None else x.new_zeros(high - low, dtype=wide)
        if wants_base:
            matrix = weight.decode(expert, expert + 1)[0]
            u = g.to(weight.dtype) @ (matrix.t() if weight.transposed else matrix)
            if dot is not None:
                dot += (u.to(wide) * read.to(wide)).sum(-1)
            if grads.x is not None:
                back = u if factor is None else u * factor
                _add(grads.x, back, rows.gather, low, high)
        if grads.bias is not None:
            grads.bias[expert] = scaled.sum(0, dtype=wide).to(grads.bias.dtype)
        if dot is not None and bias is not None:
            dot += (g.to(wide) * bias[expert].to(wide)).sum(-1)
        for index in range(len(lora)):
            _lora_backward(
                grads, index, operands, expert, (low, high), read, g, scaled, factor, dot
            )
        if grads.scale is not None and dot is not None:
            grads.scale[low:high] = dot.to(grads.scale.dtype)
    if grads.x is not None:
        grads.x = grads.x.to(x.dtype)
    grads.dropped = [None if s is None else s.to(x.dtype) for s in grads.dropped]
    return grads


def _zero_grads(operands: Operands, needs: Needs) -> Grads:
    x, _, _, scale, bias, lora = operands
    wide = _sum_dtype(x.dtype)

    def zeros(tensor: Tensor | None, need: bool, dtype: torch.dtype | None = None) -> Tensor | None:
        return torch.zeros_like(tensor, dtype=dtype) if tensor is not None and need else None

    return Grads(
        x=zeros(x, needs.x, wide),
        scale=zeros(scale, needs.scale),
        bias=zeros(bias, needs.bias),
        dropped=[zeros(x, need, wide) for need in needs.dropped],
        a=[zeros(adapter.a, need) for adapter, need in zip(lora, needs.a, strict=True)],
        b=[zeros(adapter.b, need) for adapter, need in zip(lora, needs.b, strict=True)],
    )


def _lora_backward(
    grads: Grads, index: int, operands: Operands, expert: int, span: tuple[int, int],
    read: Tensor, g: Tensor, scaled: Tensor, factor: Tensor | None, dot: Tensor | None,
) -> None:  # fmt: skip
    """Add one adapter's gradients of one expert; `scaled` is g times the rows' own factors."""
    low, high = span
    adapter, experts = operands.lora[index], operands.weight.experts
    source, a, b = _of_expert(adapter, operands, read, expert, low, high)
    inner = (g.to(adapter.dtype) @ b) * adapter.scaling  # (rows, r), before the rows' own factors
    grad_a, grad_b = grads.a[index], grads.b[index]
    product = source @ a.t() if dot is not None or grad_b is not None else None
    if dot is not None and product is not None:
        dot += (inner.to(dot.dtype) * product.to(dot.dtype)).sum(-1)
    if factor is not None:
        inner = inner * factor.to(adapter.dtype)
    if grad_a is not None:
        grad_a.view(experts, -1, grad_a.shape[-1])[expert] = inner.t() @ source
    if grad_b is not None and product is not None:
        value = (scaled.to(adapter.dtype).t() @ product) * adapter.scaling
        grad_b.view(grad_b.shape[0], -1, experts)[:, :, expert] = value
    target = grads.x if adapter.dropped is None else grads.dropped[index]
    if target is not None:
        _add(target, inner @ a, operands.rows.gather, low, high)
