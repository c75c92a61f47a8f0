"""Kernels over sorted rows: their products with a LoRA factor, and their sums to tokens.

Shapes: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, H hidden size,
I intermediate size (of the gate's), r rank (padded, see `limits.padded`), N features.

These kernels and the gate's (`gate_kernels.py`) move all of a layer's bytes besides its matrix
products, so each fuses several steps into one pass over the rows: the low-rank product with the
gate, the routing weights' gradient with the gate's. No atomics: every sum is computed by one
program, in one order.

Rows are processed in tiles of one expert's rows (`limits.tile_rows`), each tile by programs of 16
or 32 rows. A kernel writes the table of tiles as well (`routing.py`), so that the host never has to
read the routing.
"""

from typing import Any

from torch import Tensor

from .lang import launcher, tl, triton
from .limits import cdiv
from .routing import Routing

# Rows and columns of a program's step, measured on an H200 with the sizes of Qwen3-30B-A3B. One
# stage where a tile that is multiplied is stored or summed as well: with loads ahead, 64 rows by 4
# warps are a race. Hopper's product still runs while its tile is overwritten, since Triton 3.6
# gives such a load a buffer too few (up to 21 % off).
ROWS = 16
FACTOR_PART = 8192
"""Numbers of a factor in a step of tiles of 16 rows: 16 KiB of the 99 that most cards have."""


@triton.jit
def rows_of_tile(tiles, expert_offsets, BM: tl.constexpr):
    """This program's expert (-1: none), its rows, and which of them are the expert's."""
    pid = tl.program_id(0)
    expert = tl.load(tiles + 2 * pid)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < 0
    if expert >= 0:
        first, end = tl.load(tiles + 2 * pid + 1), tl.load(expert_offsets + expert + 1)
        rows += first
        live = rows < end
        if first + tl.program_id(1) * BM >= end:
            expert = -1
    return expert, rows.to(tl.int64), live


@triton.jit
def factor_rows(factor, k, j, K: tl.constexpr, RANK: tl.constexpr, OVER: tl.constexpr):
    """Rows k of a factor (K, RANK), stored (RANK, K) if OVER."""
    spots = k[:, None] * RANK + j[None, :]
    if OVER:
        spots = j[None, :] * K + k[:, None]
    return tl.load(factor + spots, mask=(k < K)[:, None], other=0.0)


@triton.jit
def product_kernel(
    x, order, factor, tiles, expert_offsets, small, bias, dots, scaling,
    K: tl.constexpr, TOP_K: tl.constexpr, RANK: tl.constexpr, OVER: tl.constexpr,
    BIASED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """small[i] = scaling x_i F_e, dots[i] = <x_i, bias_e>; x_i is row order[i] // TOP_K of x.

    small (R, RANK), F (E, K, RANK), stored (E, RANK, K) if OVER.
    """
    expert, rows, live = rows_of_tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    source = (tl.load(order + rows, mask=live, other=0) // TOP_K).to(tl.int64)
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    factor += expert.to(tl.int64) * (K * RANK)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        ok = live[:, None] & (k < K)[None, :]
        value = tl.load(x + source[:, None] * K + k[None, :], mask=ok, other=0.0)
        if RANK > 0:
            f = factor_rows(factor, k, j, K, RANK, OVER)
            product = tl.dot(value, f, product, input_precision="ieee")
        if BIASED:
            add = tl.load(bias + expert * K + k, mask=k < K, other=0.0)
            dot += tl.sum(value.to(tl.float32) * add.to(tl.float32)[None, :], 1)
    if RANK > 0:
        tail = (product * scaling).to(small.dtype.element_ty)
        tl.store(small + rows[:, None] * RANK + j[None, :], tail, mask=live[:, None])
    if BIASED:
        tl.store(dots + rows, dot, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def unpermute_kernel(
    y, inverse, weights, index, bias, out, tokens, first, size, N: tl.constexpr,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over t's assignments, in their order, of w (y_row + bias_e), in fp32.

    y (R, N) are the columns [first, first + N) of out (T, size) and bias (E, size).
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    here = t < tokens
    ok = here[:, None] & (n < N)[None, :]
    total = tl.zeros([BT, BN], tl.float32)
    for slot in tl.static_range(TOP_K):
        assignment = t * TOP_K + slot
        row = tl.load(inverse + assignment, mask=here, other=0)
        value = tl.load(y + row.to(tl.int64)[:, None] * N + n[None, :], mask=ok, other=0.0)
        value = value.to(tl.float32)
        if BIASED:
            expert = tl.load(index + assignment, mask=here, other=0).to(tl.int32)
            add = tl.load(bias + expert[:, None] * size + (first + n)[None, :], mask=ok, other=0.0)
            value += add.to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + assignment, mask=here, other=0.0).to(tl.float32)[:, None]
        total += value
    to = out + t.to(tl.int64)[:, None] * size + (first + n)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=ok)


def multiply_tokens(
    x: Tensor, routing: Routing, factor: Tensor | None, rank: int, over_rows: bool,
    scaling: float, out: Tensor, bias: Tensor | None, dots: Tensor | None,
) -> None:  # fmt: skip
    """Write the rows' products with a factor to `out`, and with a bias to `dots`."""
    # 0.02 ms at 4,096 tokens, 0.28 for DeepSeek-V3 at 16,384; 16 rows a program take 0.05 and 0.53.
    # With a bias, loads ahead would be the race that is described at `ROWS`.
    cut = {"BM": routing.tile, "BK": 64, "num_stages": 1 if bias is not None else 2}
    if routing.tile == ROWS:
        cut = {"BM": ROWS, "BK": min(512, FACTOR_PART // max(rank, 16)), "num_stages": 1}
    launcher(product_kernel, (routing.counts[0],), x)(
        x, routing.order, x if factor is None else factor,
        routing.tiles, routing.expert_offsets, out, x if bias is None else bias,
        x if dots is None else dots, scaling,
        K=x.shape[1], TOP_K=routing.top_k, RANK=rank, OVER=over_rows, BIASED=bias is not None,
        num_warps=4, **cut,
    )  # fmt: skip


def sum_to_tokens(
    y: Tensor, routing: Routing, out: Tensor, span: tuple[int, int], weights: Tensor | None,
    index: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Sum rows y `(R, span)` to the columns `span` of tokens `out`."""
    tokens, size = out.shape
    width = span[1] - span[0]
    block = min(triton.next_power_of_2(width), 1024)
    others: list[Any] = [y if t is None else t for t in (weights, index, bias)]
    launcher(unpermute_kernel, (tokens, cdiv(width, block)), y)(
        y, routing.inverse, *others, out, tokens,
        span[0], size, N=width, TOP_K=routing.top_k, WEIGHTED=weights is not None,
        BIASED=bias is not None, BT=1, BN=block, num_warps=4,
    )  # fmt: skip
