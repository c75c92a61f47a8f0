"""A whole layer of packed experts with LoRA, forward and backward, over decoded scratch.

Shape legend: T tokens, k choices a token, R = T k rows sorted by expert, E experts, H hidden size,
I intermediate size, P = 2 I (gated) or I, r1 and r2 the padded ranks of both projections.

    rows   (R, H + r1)  the tokens' rows, and beside them s1 x A1^T
    pre    (R, P)       = rows [W1 | B1]^T: the LoRA product is r1 more terms of the contraction
    inner  (R, I + r2)  h = gate(pre + bias), and beside it s2 h A2^T
    y      (R, H)       = inner [W2 | B2]^T
    out    (T, H)       the sum over choices of w (y + bias), in fp32

and backward, from the tokens' gradient g:

    rows   (R, H + r2)  g's rows, and s2 g B2
    u      (R, I)       = rows [W2 ; A2]: the gradient of h for w = 1
    dpre   (R, P + r1)  w u gate'(pre), and s1 dpre B1
    dx     (R, H)       = dpre [W1 ; A1], summed to tokens
    dw     <u, h>       needs no saved output, LoRA's part included, since u has it
    dA, dB               outer products over each expert's rows, with (R, r) on one side

Kept between the two beside inputs: pre, s1 x A1^T, s2 h A2^T and 8 R bytes of routing. The host
never waits for the device, and every sum has one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import codes, rows, scratch
from .launch import cdiv, launch
from .packed import WIDE_TILE, Packed, padded, tile_counts, tile_rows
from .products import (
    Factors,
    Rows,
    Side,
    in_backward,
    is_few,
    multiply,
    slices,
    wants_wide,
)

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}

_BLOCK = 64
"""Features in a step of the row kernels."""

# One stage: with loads ahead, Triton 3.6's product beside a store of the same tile is a race (seen
# with ranks of 64 and 128: results off by up to 26 %, and others at each run).
_COPY = {"BK": 64, "num_warps": 4, "num_stages": 1}
_GATE = {"num_warps": 4, "num_stages": 1}
_PIECES = 16
"""At most so many pieces of copied rows, however low the scratch's cap."""

_OUTER = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}


class Gate(NamedTuple):
    """h = (clamp(up, -limit, limit) + shift) act(min(gate, limit)), or act(pre) where not gated.

    Attributes:
        act: Key of `ACTS`; "silu" is z sigmoid(alpha z).
        gated: Whether pre holds gate and up.
        interleaved: Whether gate and up alternate, else gate is the first half.
        limit: Clamp, None without one.
        alpha: Of silu.
        shift: Added to up.
    """

    act: str
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0


class Lora(NamedTuple):
    """One projection's factors, as PEFT stores them.

    Attributes:
        a: `(E r, in)`, expert slowest.
        b: `(out, r E)`, expert fastest.
        scaling: Factor of the product.
    """

    a: Tensor
    b: Tensor
    scaling: float


class Layer(NamedTuple):
    """What is constant of a layer.

    Attributes:
        first: Packed stack of gate and up, `(E, P, H)`, or `(E, H, P)` where transposed.
        second: Packed stack of down, `(E, H, I)` or `(E, I, H)`.
        transposed: Whether stacks are stored `(E, in, out)`.
        partial: Whether some choices belong to no expert that is held here.
        gate: The gate.
        dtype: bf16 or fp16: of rows and decoded weights.
    """

    first: Packed
    second: Packed
    transposed: bool
    partial: bool
    gate: Gate
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """E, H, P, I."""
        experts, a, b = self.first.shape
        width, hidden = (b, a) if self.transposed else (a, b)
        return experts, hidden, width, width // 2 if self.gate.gated else width


class Routing(NamedTuple):
    """Which rows are whose.

    Attributes:
        order: `(R,)` int32: the choice (token x k + slot) in each row.
        inverse: `(R,)` int32: the row of each choice.
        bounds: `(E + 1,)` int32: rows of expert e are [bounds[e], bounds[e + 1]).
        tiles: `(n, 2)` int32: expert and first row of each tile, -1 for none.
        wide: The same of tiles of `WIDE_TILE` rows; `(0, 2)` where experts have too few rows.
        top_k: k.
        tile: Rows in a tile.
    """

    order: Tensor
    inverse: Tensor
    bounds: Tensor
    tiles: Tensor
    wide: Tensor
    top_k: int
    tile: int


class Saved(NamedTuple):
    """What backward needs beside the inputs: `pre`, and both `(R, r)` products (empty: no LoRA)."""

    pre: Tensor
    product1: Tensor
    product2: Tensor


class Grads(NamedTuple):
    """Gradients of `backward`; None where not asked for or where there is no LoRA."""

    x: Tensor | None
    weights: Tensor
    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None


def prepare(device: torch.device) -> None:
    """Find out what a CUDA device can, once, before its first layer; waits for the device."""
    codes.prepare(device)


@lru_cache(maxsize=64)
def _edges(experts: int, device: torch.device) -> Tensor:
    return torch.arange(experts + 1, device=device, dtype=torch.int16)


def route(index: Tensor, experts: int) -> Routing:
    """Sort the choices by expert, stably.

    Args:
        index: `(T, k)` integers; E and above mean no expert that is held here.
        experts: E.
    """
    count, device = index.numel(), index.device
    keys, order64 = index.reshape(-1).clamp(max=experts).to(torch.int16).sort(stable=True)
    bounds = torch.searchsorted(keys, _edges(experts, device), out_int32=True)
    order = torch.empty(count, dtype=torch.int32, device=device)
    inverse = torch.empty_like(order)
    tile = tile_rows(count, experts)
    tiles, wide = _tables(order64, bounds, order, inverse, count, tile)
    return Routing(order, inverse, bounds, tiles, wide, index.shape[-1], tile)


def _tables(
    order64: Tensor, bounds: Tensor, order: Tensor, inverse: Tensor, count: int, tile: int
) -> tuple[Tensor, Tensor]:
    """`Routing.tiles` and `wide`; order and inverse are filled in passing, where `order64` is any.

    One kernel for all of it: each launch costs the host more than this one takes.
    """
    experts, device = bounds.shape[0] - 1, bounds.device
    n, n_wide = tile_counts(count, experts, tile)
    tiles = torch.empty(n, 2, dtype=torch.int32, device=device)
    wide = torch.empty(n_wide, 2, dtype=torch.int32, device=device)
    grid = max(cdiv(order64.shape[0], 1024), cdiv(n, 32))
    launch(rows.route_kernel, (grid,),
        order64, bounds, order, inverse, tiles, wide, order64.shape[0], n, n_wide,
        E=experts, EP=triton.next_power_of_2(experts), TILE=tile, WIDE=WIDE_TILE,
        BLOCK=1024, TB=32,
    )  # fmt: skip
    return tiles, wide


def routing_of(tensors: Sequence[Tensor], shape: Sequence[int], experts: int) -> Routing:
    """The `Routing` whose tensors these are (its first five fields); shape: `(T, k)`."""
    order, inverse, bounds, tiles, wide = tensors
    tile = tile_rows(order.shape[0], experts)
    return Routing(order, inverse, bounds, tiles, wide, shape[-1], tile)


def _factors(loras: Sequence[Lora | None], layer: Layer) -> list[Factors | None]:
    """Both projections' factors as the products read them."""
    experts, made = layer.first.experts, [_padded_factors(lora, layer) for lora in loras]
    given = [(lora, factors) for lora, factors in zip(loras, made, strict=True) if lora and factors]
    if not given:
        return made
    plain = [lora.b.detach().contiguous() for lora, _ in given]
    (lora1, f1), (lora2, f2) = given[0], given[-1]
    total1 = f1.b[0].numel()
    total2 = f2.b[0].numel() if len(given) == 2 else 0
    launch(rows.spread_kernel, (cdiv(total1, 64) + cdiv(total2, 64), cdiv(experts, 64)),
        plain[0], plain[-1], f1.b, f2.b, total1, total2,
        RANK1=lora1.a.shape[0] // experts, PADDED1=f1.rank,
        RANK2=lora2.a.shape[0] // experts, PADDED2=f2.rank, E=experts, BQ=64, BE=64,
    )  # fmt: skip
    return made


def _padded_factors(lora: Lora | None, layer: Layer) -> Factors | None:
    """`Factors` whose b is room only."""
    if lora is None:
        return None
    experts = layer.first.experts
    rank = lora.a.shape[0] // experts
    wide = padded(rank)
    a = lora.a.detach().to(layer.dtype).reshape(experts, rank, -1)
    if wide != rank:
        a = F.pad(a, (0, 0, 0, wide - rank))
    b = torch.empty(experts, lora.b.shape[0], wide, dtype=layer.dtype, device=a.device)
    return Factors(a.contiguous(), b, lora.scaling)


def _sides(
    layer: Layer, routing: Routing, f1: Factors | None, f2: Factors | None, *, back: bool
) -> tuple[Side, Side, Rows]:
    """Both products of one direction, and their rows: in wider tiles where codes meet many.

    A checkpoint's recomputation decodes where backward will, which then finds it in the scratch.
    """
    count, by_rows = routing.order.shape[0], layer.transposed == back
    recomputed = not back and in_backward()

    def side(packed: Packed, factors: Factors | None) -> Side:
        few = is_few(packed, count, layer.dtype, back=not by_rows)
        if recomputed:
            few = few and is_few(packed, count, layer.dtype, back=by_rows)
        return Side(packed, factors, by_rows, back, few, layer.dtype)

    first, second = side(layer.first, f1), side(layer.second, f2)
    if any(s.few and wants_wide(s.packed, count, layer.dtype) for s in (first, second)):
        return first, second, Rows(routing.bounds, routing.wide, WIDE_TILE)
    return first, second, Rows(routing.bounds, routing.tiles, routing.tile)


def _gathered(
    layer: Layer, routing: Routing, found: Rows, x: Tensor, side: Side, factor: Tensor | None,
    name: str, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The product of the tokens' rows, and those rows' own products with a factor and a bias.

    The rows are copied a piece at a time where all of them are over the scratch's cap.
    """
    count = routing.order.shape[0]
    product = torch.empty(count, side.rank, dtype=layer.dtype, device=x.device)
    dots = torch.empty(count if bias is not None else 0, dtype=torch.float32, device=x.device)
    nbytes = count * (x.shape[1] + side.rank) * layer.dtype.itemsize
    pieces = min(_PIECES, -(-nbytes // scratch.scratch_cap(x.device)))
    if pieces <= 1:
        copied = _copied(layer, routing, x, side.factors, factor, product, dots, bias)
        return multiply(copied, side, found, name), product, dots
    out = torch.empty(count, side.features, dtype=layer.dtype, device=x.device)
    step = -(-count // pieces)
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        some = _part(routing, part)
        copied = _copied(layer, some, x, side.factors, factor, product[part], dots[part], bias)
        tiles = some.tiles if found.tile == some.tile else some.wide
        fewer = Rows(some.bounds, tiles, found.tile)
        for (start, end), columns in slices(copied, side, fewer, name):
            out[part, start:end] = columns
    return out, product, dots


def _part(routing: Routing, part: slice) -> Routing:
    """The routing of some of the rows, counted from the first of them."""
    bounds = (routing.bounds - part.start).clamp_(0, part.stop - part.start)
    order = routing.order[part]
    nothing, tile = order[:0], routing.tile
    tiles, wide = _tables(nothing, bounds, nothing, nothing, len(order), tile)
    return Routing(order, routing.inverse, bounds, tiles, wide, routing.top_k, tile)


def forward(
    layer: Layer,
    routing: Routing,
    x: Tensor,
    weights: Tensor,
    index: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    lora1: Lora | None,
    lora2: Lora | None,
) -> tuple[Tensor, Saved]:
    """The layer's output, and what its backward needs.

    Args:
        layer: The layer.
        routing: From `route`.
        x: `(T, H)` contiguous, in the layer's dtype.
        weights: `(T, k)` routing weights, contiguous.
        index: `(T, k)`, as given to `route`.
        bias1: `(E, P)` or None.
        bias2: `(E, H)` or None.
        lora1: Of the first projection, or None.
        lora2: Of the second, or None.
    """
    inner_size = layer.sizes[-1]
    f1, f2 = _factors((lora1, lora2), layer)
    side1, side2, found = _sides(layer, routing, f1, f2, back=False)
    factor = None if f1 is None else f1.a
    pre, product1, _ = _gathered(layer, routing, found, x, side1, factor, "first")
    count = routing.order.shape[0]
    inner = torch.empty(count, inner_size + side2.rank, dtype=layer.dtype, device=x.device)
    product2 = torch.empty(count, side2.rank, dtype=layer.dtype, device=x.device)
    a2 = x if f2 is None else f2.a
    launch(rows.gate_kernel, (routing.tiles.shape[0],),
        pre, pre if bias1 is None else bias1, a2, routing.tiles, routing.bounds, inner, product2,
        1.0 if f2 is None else f2.scaling, *_numbers(layer.gate),
        a2.stride(0), 1, a2.stride(1),
        I=inner_size, RANK=side2.rank, BIASED=bias1 is not None, **_gate_flags(layer.gate),
        BM=routing.tile, BI=_BLOCK, **_GATE,
    )  # fmt: skip
    out = _summed(layer, routing, inner, side2, found, "second", weights, index, bias2)
    return out, Saved(pre, product1, product2)


def _numbers(gate: Gate) -> tuple[float, float, float]:
    return gate.limit or 0.0, gate.alpha, gate.shift


def _gate_flags(gate: Gate) -> dict[str, int | bool]:
    return {
        "ACT": ACTS[gate.act],
        "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved,
        "LIMITED": gate.limit is not None,
    }


def _copied(
    layer: Layer, routing: Routing, x: Tensor, factors: Factors | None, factor: Tensor | None,
    product: Tensor, dots: Tensor, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The tokens' rows, their product with a factor beside them (and alone, and with the bias).

    factor: `(E, r, K)` if it is `factors.a`, else `(E, K, r)`.
    """
    count, size = routing.order.shape[0], x.shape[-1]
    rank = product.shape[1]
    out = torch.empty(count, size + rank, dtype=layer.dtype, device=x.device)
    f = x if factor is None else factor
    strides = (0, 0, 0)
    if factors is not None and factor is not None:
        over_rows = factor is factors.a
        strides = (f.stride(0), f.stride(2 if over_rows else 1), f.stride(1 if over_rows else 2))
    launch(rows.copy_kernel, (routing.tiles.shape[0],),
        x, routing.order, f, routing.tiles, routing.bounds, out, product,
        f if bias is None else bias, dots, 1.0 if factors is None else factors.scaling, *strides,
        K=size, TOP_K=routing.top_k, RANK=rank, GATHERS=True, BIASED=bias is not None,
        BM=routing.tile, **_COPY,
    )  # fmt: skip
    return out


def _summed(
    layer: Layer, routing: Routing, x: Tensor, side: Side, found: Rows, name: str,
    weights: Tensor | None = None, index: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The product of x's rows, summed to tokens `(T, N)`."""
    size = side.features
    tokens = routing.order.shape[0] // routing.top_k
    out = torch.empty(tokens, size, dtype=layer.dtype, device=x.device)
    for (first, end), y in slices(x, side, found, name):
        width = end - first
        block = min(triton.next_power_of_2(width), 1024)
        launch(rows.sum_kernel, (tokens, cdiv(width, block)),
            y, routing.inverse, y if weights is None else weights, y if index is None else index,
            y if bias is None else bias, routing.bounds, out, tokens, first, size,
            N=width, TOP_K=routing.top_k, E=layer.first.experts, WEIGHTED=weights is not None,
            BIASED=bias is not None, PARTIAL=layer.partial, BT=1, BN=block, num_warps=4,
        )  # fmt: skip
    return out


def backward(
    layer: Layer,
    routing: Routing,
    saved: Saved,
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    lora1: Lora | None,
    lora2: Lora | None,
    *,
    needs_x: bool = True,
) -> Grads:
    """Gradients of `forward`.

    Args:
        layer: The layer, as given to `forward`, like all that follow but `grad`.
        routing: As there.
        saved: What `forward` gave.
        grad: `(T, H)`, of the output.
        x: As there.
        weights: As there.
        bias1: As there.
        bias2: As there.
        lora1: As there.
        lora2: As there.
        needs_x: Whether x's gradient is wanted.
    """
    _, hidden, width, inner_size = layer.sizes
    grad = grad.to(layer.dtype).contiguous()
    f1, f2 = _factors((lora1, lora2), layer)
    side1, side2, found = _sides(layer, routing, f1, f2, back=True)
    u, product_g, dots = _gathered(
        layer, routing, found, grad, side2, None if f2 is None else f2.b, "second", bias2
    )
    count = u.shape[0]
    rank = side1.rank
    d_pre = torch.empty(count, width + rank, dtype=layer.dtype, device=u.device)
    empty = torch.zeros_like if layer.partial else torch.empty_like
    d_weights = empty(weights)
    launch(rows.gate_backward_kernel, (routing.tiles.shape[0],),
        u, saved.pre, u if bias1 is None else bias1, weights, routing.order, dots,
        u if f1 is None else f1.b, routing.tiles, routing.bounds, d_pre, d_weights,
        1.0 if f1 is None else f1.scaling, *_numbers(layer.gate),
        I=inner_size, RANK=rank, BIASED=bias1 is not None, DOTS=bias2 is not None,
        **_gate_flags(layer.gate), BM=routing.tile, BI=_BLOCK, **_GATE,
    )  # fmt: skip
    del u
    a1 = b1 = a2 = b2 = None
    if f2 is not None and lora2 is not None:
        a2 = _outer(lora2.a, product_g, saved.pre, layer, routing, inner_size, weights=weights,
                    bias=bias1, gates=True)  # fmt: skip
        b2 = _outer(lora2.b, saved.product2, grad, layer, routing, hidden, weights=weights,
                    gathers=True, over=True)  # fmt: skip
    if f1 is not None and lora1 is not None:
        a1 = _outer(lora1.a, d_pre[:, width:], x, layer, routing, hidden, gathers=True)
        b1 = _outer(lora1.b, saved.product1, d_pre, layer, routing, width, over=True)
    dx = None
    if needs_x:
        dx = _summed(layer, routing, d_pre, side1, found, "first")
    return Grads(dx, d_weights, a1, b1, a2, b2)


def _outer(
    like: Tensor, small: Tensor, big: Tensor, layer: Layer, routing: Routing, size: int,
    *, weights: Tensor | None = None, bias: Tensor | None = None, gathers: bool = False,
    gates: bool = False, over: bool = False,
) -> Tensor:  # fmt: skip
    """A factor's gradient in the shape and dtype of `like`; `over`: it is B, expert fastest."""
    experts = layer.first.experts
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    rank = small.shape[1]
    real = (like.shape[1] if over else like.shape[0]) // experts
    strides = (1, real * experts, experts) if over else (real * size, 1, size)
    launch(rows.outer_kernel, (cdiv(size, _OUTER["BN"]), experts),
        small, big, big if bias is None else bias, big if weights is None else weights,
        routing.order, routing.bounds, out, small.stride(0), big.stride(0), *strides,
        *_numbers(layer.gate),
        N=size, RANK=rank, REAL=real, TOP_K=routing.top_k, GATHERS=gathers,
        WEIGHTED=weights is not None, GATES=gates, BIASED=bias is not None,
        **_gate_flags(layer.gate), **_OUTER,
    )  # fmt: skip
    return out
