"""Kernels over sorted rows, and how each is launched: permute and unpermute.

Shapes: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, H hidden size,
I intermediate size (of the gate's), r rank (padded, see `limits.padded`), N features.

These kernels and the gate's (`gate_kernels.py`) move all of a layer's bytes besides its matrix
products, so each fuses what it can into one pass over the rows: the low-rank product with the copy
or the gate, the routing weights' gradient with the gate's. No atomics: every sum is computed by one
program, in one order.

Rows are processed in tiles of one expert's rows (`limits.tile_rows`), each tile by programs of 16
or 32 rows. A kernel writes the table of tiles as well (`routing.py`), so that the host never has to
read the routing.
"""

from __future__ import annotations

from .lang import tl, triton
from .launch import Geometry, launcher
from .limits import cdiv

# Rows and columns of a program's step, measured on an H200 with the sizes of
# Qwen3-30B-A3B. One stage: with loads ahead a layer is 3 % slower, and 64 rows by 4 warps are a
# race: Hopper's product still runs while its tile, which is stored as well, is overwritten, since
# Triton 3.6 gives such a load a buffer too few (up to 21 % off).
ROWS = 16
_PERMUTE_FEW = {"BM": ROWS, "num_warps": 4, "num_stages": 1}
"""For tiles of 16, where the time is the number of steps: a token is copied in 0.011 ms by 512
columns a step, in 0.034 by 64."""
FACTOR_PART = 8192
"""Numbers of a factor in such a step: 16 KiB of the 99 that most cards have."""
_STEPS = 8
"""Most steps that such a program unrolls, so that its code stays short. With a bias as well, which
only backward has, copied rows would not stay in registers."""
_PRODUCTS = {"BK": 64, "num_warps": 4}
"""For whole tiles that are not copied, only multiplied: 0.02 ms at 4,096 tokens, 0.28 for
DeepSeek-V3 at 16,384, where 16 rows a program take 0.05 and 0.53."""


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
def permute_kernel(
    x, order, factor, tiles, expert_offsets, out, small, bias, dots, scaling,
    K: tl.constexpr, STRIDE: tl.constexpr, TOP_K: tl.constexpr, RANK: tl.constexpr,
    OVER: tl.constexpr, BIASED: tl.constexpr, COPIES: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[i] = (x_i, scaling x_i F_e), small[i] the same product, dots[i] = <x_i, bias_e>.

    x_i is row order[i] // TOP_K of x. out (R, K + RANK) in rows STRIDE apart, not written where
    STRIDE is 0, and without x_i unless COPIES; small (R, RANK), F (E, K, RANK), stored (E, RANK, K)
    if OVER. STEPS, where over 1: all there are, unrolled, each one's loads ahead of the step before
    it, past whose stores the compiler would not move them.
    """
    expert, rows, live = rows_of_tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    source = (tl.load(order + rows, mask=live, other=0) // TOP_K).to(tl.int64)
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    factor += expert.to(tl.int64) * (K * RANK)
    if STEPS > 1:
        k = tl.arange(0, BK)
        if RANK > 0:
            next_f = factor_rows(factor, k, j, K, RANK, OVER)
        ok = live[:, None] & (k < K)[None, :]
        next_value = tl.load(x + source[:, None] * K + k[None, :], mask=ok, other=0.0)
    for start in tl.range(0, K, BK, loop_unroll_factor=STEPS):
        k = start + tl.arange(0, BK)
        ok = live[:, None] & (k < K)[None, :]
        if STEPS > 1:
            value = next_value
            if RANK > 0:
                f = next_f
                next_f = factor_rows(factor, k + BK, j, K, RANK, OVER)
            later = live[:, None] & (k + BK < K)[None, :]
            next_value = tl.load(x + source[:, None] * K + (k + BK)[None, :], mask=later, other=0.0)
        else:
            value = tl.load(x + source[:, None] * K + k[None, :], mask=ok, other=0.0)
        if COPIES:
            tl.store(out + rows[:, None] * STRIDE + k[None, :], value, mask=ok)
        if RANK > 0:
            if STEPS == 1:
                f = factor_rows(factor, k, j, K, RANK, OVER)
            product = tl.dot(value, f, product, input_precision="ieee")
        if BIASED:
            add = tl.load(bias + expert * K + k, mask=k < K, other=0.0)
            dot += tl.sum(value.to(tl.float32) * add.to(tl.float32)[None, :], 1)
    if RANK > 0:
        tail = (product * scaling).to(small.dtype.element_ty)
        if STRIDE > 0:
            tl.store(out + rows[:, None] * STRIDE + K + j[None, :], tail, mask=live[:, None])
        tl.store(small + rows[:, None] * RANK + j[None, :], tail, mask=live[:, None])
    if BIASED:
        tl.store(dots + rows, dot, mask=live)


@triton.jit
def copy_rows_kernel(
    x, inverse, expert_offsets, out, K: tl.constexpr, STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    E: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[inverse[a]] = row a // TOP_K of x, for each assignment a, in rows STRIDE apart.

    Only rows [0, expert_offsets[E]) of out are written. A row of x is read once for its TOP_K.
    """
    token = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    value = tl.load(x + token.to(tl.int64) * K + k, mask=k < K, other=0.0)
    end = tl.load(expert_offsets + E)
    for slot in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + slot)
        tl.store(out + row.to(tl.int64) * STRIDE + k, value, mask=(row < end) & (k < K))


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


def unrolled(size: int, block: int, tile: int) -> int:
    """Return how many steps are unrolled, each step's loads ahead of the step before: all or 1."""
    steps = cdiv(size, block)
    return steps if tile == ROWS and steps <= _STEPS else 1


def copies_apart(tile: int) -> bool:
    """Whether rows in tiles of so many are copied by `copy_rows_kernel`, and multiplied apart."""
    return tile > ROWS


@launcher(permute_kernel)
def launch_permute(
    size: int, stride: int, rank: int, over_rows: bool, top_k: int, tile: int, tiles: int,
    biased: bool,
) -> Geometry:  # fmt: skip
    """The tokens' rows, unless `copies_apart`, with the first factor's product.

    Stride 0: the product alone.
    """
    # With a bias, loads ahead would be the race that is described at `ROWS`.
    cut = {"BM": tile, **_PRODUCTS, "num_stages": 1 if biased else 2}
    if tile == ROWS:
        cut = {"BK": min(512, FACTOR_PART // max(rank, 16)), **_PERMUTE_FEW}
    return (tiles, tile // cut["BM"]), {
        "K": size, "STRIDE": stride, "TOP_K": top_k, "RANK": rank, "OVER": over_rows,
        "BIASED": biased, "COPIES": stride > 0 and not copies_apart(tile),
        "STEPS": 1 if biased else unrolled(size, cut["BK"], tile), **cut,
    }  # fmt: skip


@launcher(copy_rows_kernel)
def launch_copy_rows(tokens: int, size: int, stride: int, top_k: int, experts: int) -> Geometry:
    """The tokens' rows alone.

    54 and 231 us at 4,096 and 16,384 tokens (Qwen3-30B-A3B, H100). In the experts' order each row
    is read TOP_K times, and copying takes 72 and 346.
    """
    block = min(triton.next_power_of_2(size), 2048)
    return (tokens, cdiv(size, block)), {
        "K": size, "STRIDE": stride, "TOP_K": top_k, "E": experts, "BK": block, "num_warps": 2,
    }  # fmt: skip


@launcher(unpermute_kernel)
def launch_unpermute(
    tokens: int, first: int, end: int, size: int, top_k: int, weighted: bool, biased: bool
) -> Geometry:  # fmt: skip
    """Rows' columns [first, end) of `size`, summed to tokens."""
    width = end - first
    block = min(triton.next_power_of_2(width), 1024)
    return (tokens, cdiv(width, block)), {
        "N": width, "TOP_K": top_k, "WEIGHTED": weighted, "BIASED": biased, "BT": 1, "BN": block,
        "num_warps": 4,
    }  # fmt: skip
