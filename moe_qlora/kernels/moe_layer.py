"""A whole layer of packed experts with LoRA, forward and backward.

Shape legend: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, H hidden
size, I intermediate size, P = 2 I (gated) or I, r1 and r2 the padded ranks of both projections.

    rows   (R, H + r1)  the tokens' rows, and beside them s1 x A1^T
    pre    (R, P)       = rows [W1 | B1]^T: LoRA makes the contraction r1 longer
    inner  (R, I + r2)  h = gate(pre + bias), and beside it s2 h A2^T
    y      (R, H)       = inner [W2 | B2]^T
    out    (T, H)       the sum over a token's assignments of w (y + bias), in fp32

and backward, from the tokens' gradient g:

    rows   (R, H + r2)  g's rows, and s2 g B2
    u      (R, I)       = rows [W2 ; A2]: the gradient of h for w = 1
    dpre   (R, P + r1)  w u gate'(pre), and s1 dpre B1
    dx     (R, H)       = dpre [W1 ; A1], summed to tokens
    dw     <u, h>       needs no saved output, LoRA's part included, since u has it
    dA, dB               outer products over each expert's rows, with (R, r) on one side

Where Hopper's quantized matmul fetches tokens' rows itself, only the r columns of `rows` are there.
Kept between the two beside inputs: pre, s1 x A1^T, s2 h A2^T and 8 R bytes of routing. The host
never waits for the device, and every sum has one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import row_launches, workspace
from .expert_mm import (
    ExpertMatmul,
    gathers,
    in_backward,
    multiply,
    owner_of,
    prefers_wide_tiles,
    reorders,
    runs_quantized,
    slices,
)
from .factors import Factors, Lora, pad_factors
from .launch import aligned
from .limits import cdiv, reads_stored_factors, row_stride
from .quantized_config import Gather
from .routing import Routing, route
from .row_launches import Gate
from .weights import PackedWeight

_PIECES = 16
"""At most so many pieces of copied rows, however low the workspace's cap."""


class Layer(NamedTuple):
    """What is constant of a layer."""

    # Packed weight of gate and up, `(E, P, H)`, or `(E, H, P)` where transposed
    first: PackedWeight
    second: PackedWeight  # Packed weight of down, `(E, H, I)` or `(E, I, H)`
    transposed: bool  # Whether the weights are stored `(E, in, out)`
    partial: bool  # Whether some assignments belong to no expert that is held here
    gate: Gate
    dtype: torch.dtype  # bf16 or fp16: of rows and dequantized weights

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """E, H, P, I."""
        experts, a, b = self.first.spec.shape
        width, hidden = (b, a) if self.transposed else (a, b)
        return experts, hidden, width, width // 2 if self.gate.gated else width


class Operands(NamedTuple):
    """What a call computes from, beside its layer and top-k assignments."""

    x: Tensor  # `(T, H)`, contiguous, in the layer's dtype
    weights: Tensor  # `(T, k)`: the routing weights
    biases: Sequence[Tensor | None]  # `(E, P)` and `(E, H)`, or None
    loras: Sequence[Lora | None]  # Of both projections


class Saved(NamedTuple):
    """What backward needs beside the inputs and the routing."""

    pre: Tensor  # `(R, P)`
    products: Tensor  # `(R (r1 + r2),)`: s1 x A1^T, and behind it s2 h A2^T


class ForwardState(NamedTuple):
    """A forward up to the down projection."""

    assignments: Tensor  # `(T, k)`: the top-k index
    operands: Operands
    routing: Routing
    saved: Saved
    inner: Tensor  # `(R, I + r2)`
    matmul: ExpertMatmul  # Of the down projection
    wide: bool  # Whether matmuls go in wide tiles
    name: str  # The workspace's buffer


class Grads(NamedTuple):
    """Gradients of `backward`; None where not asked for or where there is no LoRA."""

    x: Tensor | None
    weights: Tensor
    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None


def reorder(x: Tensor) -> Tensor:
    """Return rows `(R, K)` in the order of columns of `quantized_mm_registers.py`."""
    from . import quantized_mm_registers  # its language changes: only where it works

    return quantized_mm_registers.reorder(x)


def _in_wide_tiles(count: int, *matmuls: ExpertMatmul) -> bool:
    """Whether the quantized matmul has so many rows that they go in wide tiles."""
    return any(m.on_quantized and prefers_wide_tiles(m.packed, count, m.dtype) for m in matmuls)


def _strip(count: int, width: int, like: Tensor, matmul: ExpertMatmul) -> Tensor:
    """Return room for the rows of a matmul."""
    stride = row_stride(width, like.dtype.itemsize, quantized=matmul.on_quantized)
    room = torch.empty(count, stride, dtype=like.dtype, device=like.device)
    return room if stride == width else room[:, :width]


def _gathered(
    layer: Layer, routing: Routing, wide: bool, x: Tensor, matmul: ExpertMatmul,
    factor: Tensor | None, name: str, product: Tensor, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the matmul of the tokens' rows, and those rows' own products with a bias.

    Products with a factor, `(E, r, K)` if it is `matmul.factors.a`, else `(E, K, r)`, are written
    to `product`. Rows that the matmul does not fetch itself are copied in order, those over the
    workspace's cap a piece at a time.
    """
    count = routing.count
    dots = torch.empty(count if bias is not None else 0, dtype=torch.float32, device=x.device)
    if gathers(matmul, routing, wide):
        if factor is not None or bias is not None:
            _multiply_rows(routing, x, matmul, factor, x, 0, product, dots, bias)
        gather = Gather(routing.order, product, routing.top_k, count)
        if reorders(matmul, routing):
            x = reorder(x)
        return multiply(x, matmul, routing, wide, name, gather), dots
    nbytes = count * (x.shape[1] + matmul.rank) * layer.dtype.itemsize
    pieces = min(_PIECES, cdiv(nbytes, workspace.workspace_cap(x.device)))
    if pieces <= 1:
        copied = _copied(routing, x, matmul, factor, product, dots, bias)
        return multiply(copied, matmul, routing, wide, name), dots
    out = torch.empty(count, matmul.features, dtype=layer.dtype, device=x.device)
    step = cdiv(cdiv(count, pieces), 64) * 64  # pieces start at multiples of 16 bytes
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        some = routing.part(part)
        rank = matmul.rank
        copied = _copied(
            some, x, matmul, factor, product[first * rank : part.stop * rank], dots[part], bias
        )
        for (start, end), columns in slices(copied, matmul, some, wide, name):
            out[part, start:end] = columns
    return out, dots


def gate_up_forward(layer: Layer, index: Tensor, operands: Operands) -> ForwardState:
    """Compute all of a forward that a checkpoint recomputes: all but the down projection.

    index: `(T, k)` integers, of which E and above mean no expert that is held here.
    """
    x, bias1 = aligned(operands.x), operands.biases[0]
    routing = route(aligned(index.contiguous()), layer.first.experts)
    count, recomputed = routing.count, in_backward()
    by_rows = not layer.transposed
    # What a recomputation dequantizes, backward finds in the workspace, if nothing displaces it.
    quantized1 = runs_quantized(
        layer.first, count, layer.dtype, back=not by_rows, reused_in_backward=recomputed
    )
    quantized2 = runs_quantized(layer.second, count, layer.dtype, back=not by_rows)
    few = reads_stored_factors(count, layer.first.experts)
    as_stored = few and quantized1, few and quantized2
    f1, f2 = pad_factors(operands.loras, layer.first.experts, layer.dtype, as_stored)
    matmul1 = ExpertMatmul(layer.first, f1, by_rows, False, quantized1, layer.dtype)
    matmul2 = ExpertMatmul(layer.second, f2, by_rows, False, quantized2, layer.dtype)
    wide = _in_wide_tiles(count, matmul1, matmul2)
    sizes = count * matmul1.rank, count * matmul2.rank
    products = torch.empty(sum(sizes), dtype=layer.dtype, device=x.device)
    product1, product2 = products.split_with_sizes(sizes)
    factor = None if f1 is None else f1.a
    pre, _ = _gathered(layer, routing, wide, x, matmul1, factor, "first", product1)
    inner_size = layer.sizes[-1]
    inner = _strip(count, inner_size + matmul2.rank, x, matmul2)
    bias = None if bias1 is None else aligned(bias1)
    launch = row_launches.gate(
        layer.gate, inner_size, inner.stride(0), matmul2.rank, routing.tile, routing.counts[0],
        reorders(matmul2, routing), pre.dtype, None if bias is None else bias.dtype,
        pre.get_device(),
    )  # fmt: skip
    launch(
        pre, pre if bias is None else bias, x if f2 is None else f2.a, routing.tiles,
        routing.expert_offsets, inner, product2, 1.0 if f2 is None else f2.scaling,
        *row_launches.numbers(layer.gate),
    )  # fmt: skip
    name = "second" if recomputed else "first"
    saved = Saved(pre, products)
    return ForwardState(index, operands, routing, saved, inner, matmul2, wide, name)


def down_forward(layer: Layer, state: ForwardState, out: Tensor | None = None) -> Tensor:
    """Return the layer's output `(T, H)`, in `out` if given: the down projection, summed."""
    return _summed(
        layer, state.inner, state.matmul, state.routing, state.wide, state.name, out,
        state.operands.weights, state.assignments, state.operands.biases[1],
    )  # fmt: skip


def _copied(
    routing: Routing, x: Tensor, matmul: ExpertMatmul, factor: Tensor | None, product: Tensor,
    dots: Tensor, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the tokens' rows and their product with a factor; fill `product` and `dots`."""
    out = _strip(routing.count, x.shape[-1] + matmul.rank, x, matmul)
    _multiply_rows(routing, x, matmul, factor, out, out.stride(0), product, dots, bias)
    return out


def _multiply_rows(
    routing: Routing, x: Tensor, matmul: ExpertMatmul, factor: Tensor | None, out: Tensor,
    stride: int, product: Tensor, dots: Tensor, bias: Tensor | None,
) -> None:  # fmt: skip
    """Fill `product` and `dots`, and `out` with the rows, unless its stride is given as 0."""
    factors = matmul.factors
    f = x if factor is None else factor
    over_rows = factors is not None and factor is factors.a
    launch = row_launches.copy(
        x.shape[-1], stride, matmul.rank, over_rows, routing.top_k, routing.tile, routing.counts[0],
        x.dtype, None if bias is None else bias.dtype, x.get_device(),
    )  # fmt: skip
    launch(
        x, routing.order, f, routing.tiles, routing.expert_offsets, out, product,
        f if bias is None else bias, dots, 1.0 if factors is None else factors.scaling,
    )  # fmt: skip


def _summed(
    layer: Layer, x: Tensor, matmul: ExpertMatmul, routing: Routing, wide: bool, name: str,
    out: Tensor | None = None, weights: Tensor | None = None, index: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the matmul of x's rows, summed to tokens `(T, N)`."""
    size, tokens = matmul.features, routing.count // routing.top_k
    if out is None:
        out = torch.empty(tokens, size, dtype=layer.dtype, device=x.device)
    weights, index, bias = (None if t is None else aligned(t) for t in (weights, index, bias))
    kinds = tuple(None if t is None else t.dtype for t in (weights, index, bias))
    for (first, end), y in slices(x, matmul, routing, wide, name):
        launch = row_launches.to_tokens(
            tokens, first, end, size, routing.top_k, routing.experts, layer.partial, y.dtype,
            kinds, y.get_device(),
        )  # fmt: skip
        launch(
            y, routing.inverse, y if weights is None else weights, y if index is None else index,
            y if bias is None else bias, routing.expert_offsets, out, tokens, first, size,
        )  # fmt: skip
    return out


def backward(
    layer: Layer,
    routing: Routing,
    saved: Saved,
    grad: Tensor,
    operands: Operands,
    *,
    needs_x: bool = True,
) -> Grads:
    """Return the gradients of a forward, from its operands, its state and `grad` `(T, H)`."""
    _, hidden, width, inner_size = layer.sizes
    count = routing.count
    grad = aligned(grad.to(layer.dtype).contiguous())
    x, weights = aligned(operands.x), aligned(operands.weights)
    bias1, bias2 = (None if b is None else aligned(b) for b in operands.biases)
    lora1, lora2 = operands.loras
    f1, f2 = pad_factors(operands.loras, layer.first.experts, layer.dtype)
    matmul1, matmul2, name = _backward_matmuls(layer, routing, f1, f2)
    wide = _in_wide_tiles(count, matmul1, matmul2)
    product_g = torch.empty(count * matmul2.rank, dtype=layer.dtype, device=grad.device)
    factor = None if f2 is None else f2.b
    u, dots = _gathered(layer, routing, wide, grad, matmul2, factor, name, product_g, bias2)
    keeps = f2 is not None
    d_pre, d_weights = _gate_backward(
        layer, routing, saved.pre, u, dots, weights, bias1, bias2, matmul1, keeps
    )
    sizes = count * matmul1.rank, count * matmul2.rank
    product1, product2 = saved.products.split_with_sizes(sizes)
    a1 = b1 = a2 = b2 = None
    if f2 is not None and lora2 is not None:
        a2 = _outer(lora2.a, product_g, f2.rank, u, routing, inner_size, weights=weights)
        b2 = _outer(lora2.b, product2, f2.rank, grad, routing, hidden, weights=weights,
                    gathers=True, over=True)  # fmt: skip
    del u
    if f1 is not None and lora1 is not None:
        a1 = _outer(lora1.a, d_pre[:, width:], d_pre.stride(0), x, routing, hidden,
                    gathers=True, rank=f1.rank)  # fmt: skip
        b1 = _outer(lora1.b, product1, f1.rank, d_pre, routing, width, over=True)
    dx = _summed(layer, d_pre, matmul1, routing, wide, "first") if needs_x else None
    return Grads(dx, d_weights, a1, b1, a2, b2)


def _gate_backward(
    layer: Layer, routing: Routing, pre: Tensor, u: Tensor, dots: Tensor, weights: Tensor,
    bias1: Tensor | None, bias2: Tensor | None, matmul: ExpertMatmul, keeps: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the pre-activation, LoRA's beside it, and of the routing weights.

    u `(R, I)` is the gate's gradient before the routing weights, `dots` as `_gathered` returns it.
    Where `keeps`, what the gate returned is written over u: a factor's gradient needs it.
    """
    factors, size = matmul.factors, layer.sizes[-1]
    d_pre = _strip(routing.count, pre.shape[1] + matmul.rank, u, matmul)
    empty = torch.zeros_like if layer.partial else torch.empty_like
    d_weights = empty(weights)
    kinds = weights.dtype, *(None if b is None else b.dtype for b in (bias1, bias2))
    launch = row_launches.gate_backward(
        layer.gate, size, d_pre.stride(0), matmul.rank, routing.tile, routing.counts[0], keeps,
        u.dtype, kinds, u.get_device(),
    )  # fmt: skip
    launch(
        u, pre, u if bias1 is None else bias1, weights, routing.order, dots,
        u if factors is None else factors.b, routing.tiles, routing.expert_offsets, d_pre,
        d_weights, 1.0 if factors is None else factors.scaling, *row_launches.numbers(layer.gate),
    )  # fmt: skip
    return d_pre, d_weights


def _backward_matmuls(
    layer: Layer, routing: Routing, f1: Factors | None, f2: Factors | None
) -> tuple[ExpertMatmul, ExpertMatmul, str]:
    """Return backward's matmuls, on what the workspace still holds, and the second's buffer."""
    by_rows, device = layer.transposed, routing.ints.device
    owners = [owner_of(packed, routing) for packed in (layer.first, layer.second)]
    held1 = workspace.holds("first", device, owners[0])
    held2 = workspace.holds("second", device, owners[1])
    name = "second" if held1 or held2 else "first"
    held2 = held2 or workspace.holds(name, device, owners[1])

    def matmul(packed: PackedWeight, factors: Factors | None, held: bool) -> ExpertMatmul:
        on_quantized = not held and runs_quantized(
            packed, routing.count, layer.dtype, back=not by_rows, in_order=True
        )
        return ExpertMatmul(packed, factors, by_rows, True, on_quantized, layer.dtype)

    return matmul(layer.first, f1, held1), matmul(layer.second, f2, held2), name


def _outer(
    like: Tensor, small: Tensor, stride: int, big: Tensor, routing: Routing, size: int, *,
    rank: int | None = None, weights: Tensor | None = None, gathers: bool = False,
    over: bool = False,
) -> Tensor:  # fmt: skip
    """Return a factor's gradient like `like`; `over`: it is B, expert fastest."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    real = (like.shape[1] if over else like.shape[0]) // routing.experts
    launch = row_launches.outer(
        size, rank or stride, stride, big.stride(0), real, routing.experts, routing.top_k, gathers,
        over, (big.dtype, like.dtype, None if weights is None else weights.dtype),
        out.get_device(),
    )  # fmt: skip
    # Written experts last at once, 2 bytes at a time, B's gradients take 1.3 to 1.7 times as long.
    first = torch.empty_like(out) if over else out
    launch(
        small, big, big if weights is None else weights, routing.order, routing.expert_offsets,
        first,
    )  # fmt: skip
    if over:
        total = out.numel() // routing.experts
        last = row_launches.interleave(routing.experts, total, out.dtype, out.get_device())
        last(first, out, total)
    return out
