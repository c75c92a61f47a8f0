"""One projection by grouped matrix products: no loop over experts, no wait for the device.

They are torch's or, where these would wait (`cards.py`), `grouped_mm.py`'s.

The weight is dequantized into memory that lives for the call only; weights that
`limits.dequantizes_whole` refuses are left to `reference.py`. What `reference.py` does expert by
expert is done here for all rows at once; its docstring has the formula and the legend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cards
from .limits import GROUP
from .reference import Grads, LoraInputs, Needs, Operands, Rows, Weight


class _Products:
    """The grouped products over one call's rows.

    float32 factors, and everything without Triton, are left to torch.
    """

    def __init__(self, rows: Rows) -> None:
        self.expert_offsets = rows.expert_offsets.to(torch.int32)
        self.tiles: tuple[Tensor, int] | None = None

    def __call__(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return `(R, N)`: each expert's rows of x `(R, K)` times its matrix `(K, N)`."""
        kernels = _kernels(x)
        if kernels is None:
            return F.grouped_mm(x, matrices, offs=self.expert_offsets[1:])
        grouped_mm, routing = kernels
        if self.tiles is None:
            self.tiles = routing.tabulate(self.expert_offsets, len(x))
        cut = grouped_mm.default(self.tiles[1], x.device)
        x, matrices = _rows(x), matrices if 1 in matrices.stride()[1:] else matrices.contiguous()
        return grouped_mm.launch(x, matrices, self.expert_offsets, *self.tiles, cut)

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `(E, P, Q)`: a^T b over each expert's rows, of a `(R, P)` and b `(R, Q)`."""
        kernels = _kernels(a)
        if kernels is None:
            return F.grouped_mm(a.contiguous().t(), b.contiguous(), offs=self.expert_offsets[1:])
        return kernels[0].outer(_rows(a), _rows(b), self.expert_offsets)


def _kernels(x: Tensor) -> tuple[Any, Any] | None:
    """Return the modules `grouped_mm` and `routing` where they multiply, None where torch does."""
    if cards.multiplies_by_torch(x.device, x.dtype):
        return None
    try:
        from . import grouped_mm, routing
    except ImportError:  # no Triton
        return None
    return grouped_mm, routing


def _rows(x: Tensor) -> Tensor:
    """Return x with the elements of a row one behind the other, from a multiple of 16 bytes on."""
    apart = x.stride(1) != 1 or x.stride(0) % GROUP or x.data_ptr() % 16
    return x.clone(memory_format=torch.contiguous_format) if apart else x


def forward(operands: Operands) -> Tensor:
    """As `reference.forward`."""
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
    y = _live(y, rows)
    return _to_tokens(y, rows).to(x.dtype) if rows.scatters else y


def backward(grad: Tensor, operands: Operands, needs: Needs) -> Grads:
    """As `reference.backward`."""
    x, weight, rows, scale, bias, lora = operands
    grouped = _Products(rows)
    g = _live(grad.index_select(0, rows.token) if rows.scatters else grad, rows)
    factor = None if scale is None else scale[:, None]
    read = _read(x, rows)
    wants_scale = needs.scale and scale is not None
    u: Tensor | None = None
    if needs.x or wants_scale:
        matrices = weight.decode(0, weight.experts)
        left = matrices.transpose(1, 2) if weight.transposed else matrices
        u = _live(grouped(g.to(weight.dtype), left), rows)
        del matrices, left
    dot = (u.float() * read.float()).sum(-1) if wants_scale and u is not None else None
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
        inner = _live(grouped(g.to(adapter.dtype), b) * adapter.scaling, rows)
        product: Tensor | None = None
        if dot is not None or needs.b[index]:
            product = _live(grouped(source, a.transpose(1, 2)), rows)
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
    """Return the expert of each row, `(R,)`; the last one for rows of no expert."""
    places = torch.arange(rows.order.shape[0], device=rows.order.device)
    experts = torch.searchsorted(rows.expert_offsets[1:].contiguous(), places, right=True)
    return experts.clamp_(max=weight.experts - 1)


def _live(y: Tensor, rows: Rows) -> Tensor:
    """Zero the rows of no expert, which grouped_mm leaves as it finds them."""
    if not rows.partial:
        return y
    places = torch.arange(y.shape[0], device=y.device)
    return torch.where((places < rows.expert_offsets[-1])[:, None], y, 0)


def _to_tokens(y: Tensor, rows: Rows) -> Tensor:
    """Sum a token's rows, in the order of its assignments: `(R, n)` -> `(T, n)` in fp32."""
    each = y.index_select(0, rows.inverse).view(-1, rows.top_k, y.shape[-1])
    return each.sum(1, dtype=torch.promote_types(y.dtype, torch.float32))


def _to_input(y: Tensor, rows: Rows) -> Tensor:
    y = _live(y, rows)
    return _to_tokens(y, rows) if rows.gathers else y


def _pad(tensor: Tensor, dim: int) -> Tensor:
    short = -tensor.shape[dim] % GROUP
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, short]) if short else tensor


def _factors(adapter: LoraInputs, experts: int) -> tuple[Tensor, Tensor]:
    """Return `(E, r, in)` and `(E, out, r)`, contiguous, r padded by zeros to whole 16 bytes."""
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
