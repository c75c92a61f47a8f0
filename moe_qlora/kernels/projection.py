"""One projection of a layer's experts over sorted tokens, forward and backward, in two ways.

Shape legend: T tokens, k assignments a token, R = T k rows (one for each top-k assignment, sorted
by expert), E experts, r rank.

For row i of expert e:  y_i = x_i W_e^T + b_e + sum_j s_j (d_j(x_i) A_je^T) B_je^T,  times scale_i
where there is one. No gradient for W is computed.

`LOOP` runs on any device, and is the reference for all other results. It decodes one expert at a
time, and only experts that have rows, so that no whole dequantized layer exists. `GROUPED` computes
all rows at once by grouped matmuls, without waiting for the device: torch's or, where these would
wait (`cards.py`), `grouped_mm.py`'s. It dequantizes a whole weight for the length of the call;
weights that `limits.dequantizes_whole` refuses go through the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cards
from .limits import GROUP, WIDE_TILE, wide_tile

Decode = Callable[[int, int], Tensor]
"""[first, last) -> `(last - first, ...)` matrices of these experts as stored, to compute with."""


@dataclass(frozen=True)
class Rows:
    """Where each sorted row comes from and goes to."""

    order: Tensor  # `(R,)` int64: the assignment (token x k + slot) in each sorted row
    expert_offsets: Tensor  # `(E + 1,)`: rows [offsets[e], offsets[e + 1]) belong to expert e
    top_k: int
    gathers: bool  # Whether the input rows are tokens, else sorted rows
    scatters: bool  # Whether the output is summed to tokens, else sorted rows

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
        """(expert, first row, one past its last) of each expert with rows; waits for the device.

        On meta the first k experts have all tokens, which is the most that one of them can have.
        """
        if self.order.is_meta:
            tokens = self.order.shape[0] // self.top_k
            yield from ((e, e * tokens, (e + 1) * tokens) for e in range(self.top_k))
            return
        for expert, (low, high) in enumerate(pairwise(self.expert_offsets.tolist())):
            if high > low:
                yield expert, low, high


@dataclass(frozen=True)
class LoraInputs:
    """One LoRA adapter's inputs to a projection."""

    # x after the adapter's dropout; None where there is none
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
    """One projection's weight."""

    decode: Decode  # Gives experts' matrices
    experts: int  # E
    out_features: int  # Rows of the matrix as applied
    transposed: bool  # Whether it is stored `(in, out)`
    dtype: torch.dtype  # Dtype to compute in


class Operands(NamedTuple):
    """One projection's tensors."""

    x: Tensor  # `(N, in)`
    weight: Weight
    rows: Rows
    scale: Tensor | None  # `(R,)` factors of the rows, None for 1
    bias: Tensor | None  # `(E, out)`, or None
    lora: Sequence[LoraInputs]


@dataclass
class Grads:
    """Gradients of `backward`; None where not needed."""

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


def _select(tensor: Tensor, index: Tensor | None, low: int, high: int) -> Tensor:
    return tensor[low:high] if index is None else tensor.index_select(0, index[low:high])


def _add(target: Tensor, value: Tensor, index: Tensor | None, low: int, high: int) -> None:
    # A token has an expert once at most, so no row is added twice in one call, and calls come in
    # the experts' order: every sum has one order, as atomics would not.
    if index is None:
        target[low:high] += value.to(target.dtype)
    else:
        target.index_add_(0, index[low:high], value.to(target.dtype))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_expert(
    adapter: LoraInputs, operands: Operands, read: Tensor, expert: int, low: int, high: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = adapter.dtype
    if adapter.dropped is not None:
        read = _select(adapter.dropped, operands.rows.gather, low, high)
    a, b = adapter.factors(operands.weight.experts)
    return read.to(dtype), a[expert].to(dtype), b[:, :, expert].to(dtype)


def _loop_forward(operands: Operands) -> Tensor:
    x, weight, rows, scale, bias, lora = operands
    dtype = x.dtype if rows.scatter is None else _sum_dtype(x.dtype)
    out = torch.zeros(rows.outputs, weight.out_features, dtype=dtype, device=x.device)
    for expert, low, high in rows.spans():
        matrix = weight.decode(expert, expert + 1)[0]
        read = _select(x, rows.gather, low, high)
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


def _loop_backward(grad: Tensor, operands: Operands, needs: Needs) -> Grads:
    x, weight, rows, scale, bias, lora = operands
    wide = _sum_dtype(x.dtype)
    grads = _zero_grads(operands, needs)
    wants_base = needs.x or (needs.scale and scale is not None)
    for expert, low, high in rows.spans():
        g = _select(grad, rows.scatter, low, high)
        factor = None if scale is None else scale[low:high, None]
        scaled = g if factor is None else g * factor
        read = _select(x, rows.gather, low, high)
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


class _Products:
    """The grouped products over one call's rows.

    torch's for float32 factors, and for all products without Triton.
    """

    def __init__(self, rows: Rows) -> None:
        self.expert_offsets = rows.expert_offsets.to(torch.int32)
        self.tiles: Tensor | None = None

    def __call__(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return `(R, N)`: each expert's rows of x `(R, K)` times its matrix `(K, N)`."""
        kernels = _kernels(x)
        if kernels is None:
            return _by_torch(x, matrices, self.expert_offsets[1:])
        grouped_mm, routing = kernels
        experts, count = len(self.expert_offsets) - 1, len(x)
        tile = wide_tile(count, experts, WIDE_TILE)
        if self.tiles is None:
            self.tiles = routing.tabulate(self.expert_offsets, experts, count, tile).tiles
        cut = grouped_mm.default(tile, x.device)
        x, matrices = _rows(x), matrices if 1 in matrices.stride()[1:] else matrices.contiguous()
        return grouped_mm.launch(x, matrices, self.expert_offsets, self.tiles, tile, cut)

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `(E, P, Q)`: a^T b over each expert's rows, of a `(R, P)` and b `(R, Q)`."""
        kernels = _kernels(a)
        if kernels is None:
            return _by_torch(a.contiguous().t(), b.contiguous(), self.expert_offsets[1:])
        return kernels[0].outer(_rows(a), _rows(b), self.expert_offsets)


def _by_torch(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped matmul: of a's rows `(R, K)`, or of its columns `(P, R)`, before each end."""
    if a.is_meta and a.dtype != torch.bfloat16:  # which torch 2.13 computes, but not on meta
        return a.new_empty(*([len(ends)] if b.ndim == 2 else []), a.shape[0], b.shape[-1])
    return F.grouped_mm(a, b, offs=ends)


def _kernels(x: Tensor) -> tuple[Any, Any] | None:
    """Return the modules `grouped_mm` and `routing` where they multiply, None where torch does."""
    if cards.multiplies_by_torch(x.device, x.dtype):
        return None
    from . import grouped_mm, routing
    from .lang import HAS_TRITON

    if not HAS_TRITON and not x.is_meta:
        return None
    return grouped_mm, routing


def _rows(x: Tensor) -> Tensor:
    apart = x.stride(1) != 1 or x.stride(0) % GROUP or x.data_ptr() % 16
    return x.clone(memory_format=torch.contiguous_format) if apart else x


def _grouped_forward(operands: Operands) -> Tensor:
    x, weight, rows, scale, bias, lora = operands
    grouped = _Products(rows)
    read = _read(x, rows)
    matrices = weight.decode(0, weight.experts)
    right = matrices if weight.transposed else matrices.transpose(1, 2)
    y = grouped(read.to(weight.dtype), right)
    del matrices, right
    if bias is not None:
        y = y + bias.to(y.dtype).index_select(0, _experts(rows, weight))
    for adapter in lora:
        source = read if adapter.dropped is None else _read(adapter.dropped, rows)
        a, b = _factors(adapter, weight.experts)
        inner = grouped(source.to(adapter.dtype), a.transpose(1, 2))
        y = y + grouped(inner * adapter.scaling, b.transpose(1, 2))
    y = y.to(x.dtype)
    if scale is not None:
        y = y * scale[:, None]
    return _to_tokens(y, rows).to(x.dtype) if rows.scatters else y


def _grouped_backward(grad: Tensor, operands: Operands, needs: Needs) -> Grads:
    x, weight, rows, scale, bias, lora = operands
    grouped = _Products(rows)
    g = grad.index_select(0, rows.token) if rows.scatters else grad
    factor = None if scale is None else scale[:, None]
    read = _read(x, rows)
    u: Tensor | None = None
    if needs.x or needs.scale:
        matrices = weight.decode(0, weight.experts)
        left = matrices.transpose(1, 2) if weight.transposed else matrices
        u = grouped(g.to(weight.dtype), left)
        del matrices, left
    dot = (u.float() * read.float()).sum(-1) if needs.scale and u is not None else None
    back = None if u is None or not needs.x else (u if factor is None else u * factor)
    del u
    grads = Grads(None, None, None, [], [], [])
    if bias is not None:
        experts = _experts(rows, weight)
        if dot is not None:
            dot += (g.float() * bias.float().index_select(0, experts)).sum(-1)
        if needs.bias:
            total = torch.zeros(bias.shape, dtype=torch.float32, device=grad.device)
            outer = g if factor is None else g * factor
            grads.bias = total.index_add_(0, experts, outer.float()).to(bias.dtype)
    for index, adapter in enumerate(lora):
        source = read if adapter.dropped is None else _read(adapter.dropped, rows)
        source = source.to(adapter.dtype)
        a, b = _factors(adapter, weight.experts)
        inner = grouped(g.to(adapter.dtype), b) * adapter.scaling
        product: Tensor | None = None
        if dot is not None or needs.b[index]:
            product = grouped(source, a.transpose(1, 2))
        if dot is not None and product is not None:
            dot += (inner.float() * product.float()).sum(-1)
        inner = inner if factor is None else inner * factor.to(inner.dtype)
        grads.a.append(_grad_a(inner, source, grouped, adapter) if needs.a[index] else None)
        outer = g if factor is None else g * factor
        grads.b.append(
            _grad_b(outer.to(adapter.dtype), product, grouped, adapter)
            if needs.b[index] and product is not None
            else None
        )
        onward = grouped(inner, a)
        if adapter.dropped is None:
            back = None if back is None else back + onward
            grads.dropped.append(None)
        else:
            wanted = needs.dropped[index]
            grads.dropped.append(_to_input(onward, rows).to(x.dtype) if wanted else None)
    grads.x = None if back is None else _to_input(back, rows).to(x.dtype)
    grads.scale = None if dot is None or scale is None else dot.to(scale.dtype)
    return grads


def _read(x: Tensor, rows: Rows) -> Tensor:
    return x.index_select(0, rows.token) if rows.gathers else x


def _experts(rows: Rows, weight: Weight) -> Tensor:
    places = torch.arange(rows.order.shape[0], device=rows.order.device)
    experts = torch.searchsorted(rows.expert_offsets[1:].contiguous(), places, right=True)
    return experts.clamp_(max=weight.experts - 1)


def _to_tokens(y: Tensor, rows: Rows) -> Tensor:
    """Sum a token's rows, in the order of its assignments: `(R, n)` -> `(T, n)` in fp32."""
    each = y.index_select(0, rows.inverse).view(-1, rows.top_k, y.shape[-1])
    return each.sum(1, dtype=torch.promote_types(y.dtype, torch.float32))


def _to_input(y: Tensor, rows: Rows) -> Tensor:
    return _to_tokens(y, rows) if rows.gathers else y


def _pad(tensor: Tensor, dim: int) -> Tensor:
    short = -tensor.shape[dim] % GROUP
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, short]) if short else tensor


def _factors(adapter: LoraInputs, experts: int) -> tuple[Tensor, Tensor]:
    a, b = adapter.factors(experts)
    a, b = _pad(a.to(adapter.dtype), 1), _pad(b.permute(2, 0, 1).to(adapter.dtype), 2)
    return a.contiguous(), b.contiguous()


def _grad_a(inner: Tensor, source: Tensor, grouped: _Products, adapter: LoraInputs) -> Tensor:
    grad = grouped.outer(inner, source)
    rank = adapter.a.shape[0] // grad.shape[0]
    return grad[:, :rank].reshape(adapter.a.shape).to(adapter.a.dtype)


def _grad_b(outer: Tensor, product: Tensor, grouped: _Products, adapter: LoraInputs) -> Tensor:
    grad = grouped.outer(outer, product) * adapter.scaling
    rank = adapter.b.shape[1] // grad.shape[0]
    return grad[:, :, :rank].permute(1, 2, 0).reshape(adapter.b.shape).to(adapter.b.dtype)


class Way(NamedTuple):
    """How a projection is computed."""

    forward: Callable[[Operands], Tensor]
    backward: Callable[[Tensor, Operands, Needs], Grads]


LOOP = Way(_loop_forward, _loop_backward)
GROUPED = Way(_grouped_forward, _grouped_backward)
