"""Each expert's rows times its matrix, in 16 bit: for cards where torch's grouped matmul waits.

x `(R, K)`, rows sorted by expert; matrices `(E, K, N)` as views of the workspace, whose rows or
columns lie one behind the other; out comes `(R, N)`. A program computes one tile of rows, which
`routing.py` has cut so that all are of one expert, by some of the features. Nobody on the host
knows where an expert's rows begin, so that it never waits. Rows of no expert are left as they are.

Programs that run at the same time share what they read: `GROUP` tiles of rows go through the same
features before the next ones, so that matrices and rows are found in the second cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cards
from .launch import Launch
from .limits import cdiv


class Cut(NamedTuple):
    """How the kernel is cut."""

    features: int  # Features that come out of a program
    step: int  # Features summed over in a step
    stages: int  # Steps loaded ahead
    warps: int  # Warps in a program
    group: int  # Tiles of rows that go through the same features at a time


CANDIDATES = tuple(
    Cut(features, step, stages, warps, 8)
    for features, step, stages, warps in (
        (64, 64, 4, 4), (128, 32, 3, 4), (128, 32, 4, 4), (128, 64, 3, 4), (128, 64, 4, 4),
        (128, 64, 3, 8), (128, 64, 4, 8), (256, 32, 3, 8), (256, 32, 4, 8), (256, 64, 3, 8),
        (256, 64, 4, 8),
    )
)  # fmt: skip

_MIDDLE = dict.fromkeys((16, 32, 64, 128), Cut(128, 64, 3, 4, 8))
"""What is used untuned, by the rows in a tile: the code for 8.6 is quickest so on an H200, or less
than 3 % behind."""

_SMALL = {**_MIDDLE, 128: Cut(128, 32, 4, 4, 8)}
"""The same on a card with 99 KiB, which holds two programs at a time in half steps."""

_LARGE = {
    16: Cut(128, 64, 4, 4, 8),
    32: Cut(128, 64, 4, 4, 8),
    64: Cut(256, 64, 4, 8, 8),
    128: Cut(256, 64, 3, 8, 8),
}
"""The same on Hopper and datacenter Blackwell: on an H200 as quick as torch's for many rows."""

_MIDDLE_SHARED = 160 << 10
"""Bytes of shared memory from which on `_MIDDLE` is used: 8.0 has 163 KiB."""


def default(tile: int, device: torch.device) -> Cut:
    """Return the cut that is used untuned for tiles of so many rows."""
    card = cards.card(device)
    if card.runs_on:
        return _LARGE[tile]
    return (_MIDDLE if card.shared >= _MIDDLE_SHARED else _SMALL)[tile]


def shared_bytes(cut: Cut, tile: int, card: cards.Card) -> int:
    """Return the shared memory of a program, as Triton 3.6 lays it out, up to a few bytes."""
    # Where the product is not done when the step ends, its tiles have a buffer of their own.
    buffers = cut.stages - (0 if card.runs_on and tile >= 64 else 1)
    return buffers * (tile + cut.features) * cut.step * 2


def fits(cut: Cut, tile: int, card: cards.Card) -> bool:
    """Whether a card has the shared memory for a cut, and the registers for its sums."""
    enough = tile * cut.features <= 128 * 32 * cut.warps
    return enough and shared_bytes(cut, tile, card) + 256 <= card.shared


@triton.jit(do_not_specialize=["count"])
def grouped_kernel(
    x, matrices, tiles, expert_offsets, y, count,
    K: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, SE: tl.constexpr, SK: tl.constexpr,
    SN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """y (R, N) = x (R, K), in rows STRIDE apart, times each expert's (K, N), SK and SN apart.

    tiles (count, 2): expert and first row of each, an expert of -1 for none.
    """
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    first_tile = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(count - first_tile, GROUP)
    within = pid % (GROUP * COLUMNS)
    tile = first_tile + within % size
    expert = tl.load(tiles + 2 * tile)
    if expert < 0:
        return
    start = tl.load(tiles + 2 * tile + 1)
    rows = tl.load(expert_offsets + expert + 1) - start
    # Beyond the last row it is read again, and beyond the last feature that one: no mask is needed.
    m = tl.arange(0, BM)
    n = within // size * BN + tl.arange(0, BN)
    inside = n < N
    safe = n
    if N % BN != 0 and SN != 1:
        safe = tl.minimum(n, N - 1)
    k = tl.arange(0, BK)
    left = x + start.to(tl.int64) * STRIDE
    left += tl.minimum(m, rows - 1)[:, None] * STRIDE + k[None, :]
    right = matrices + expert.to(tl.int64) * SE + safe[None, :] * SN + k[:, None] * SK
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, mask=(first + k < K)[None, :], other=0.0)
        if N % BN != 0 and SN == 1:
            b = tl.load(right, mask=inside[None, :] & (first + k < K)[:, None], other=0.0)
        elif K % BK == 0:
            b = tl.load(right)
        else:
            b = tl.load(right, mask=(first + k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK
        right += BK * SK
    to = y + start.to(tl.int64) * N + m[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & inside[None, :])


def launch(
    x: Tensor, matrices: Tensor, expert_offsets: Tensor, tiles: Tensor, tile: int, cut: Cut
) -> Tensor:
    """Return `(R, N)`: each expert's rows of x `(R, K)` times its matrix of `(E, K, N)`.

    Rows of x lie any distance apart, as do the rows of matrices, or their columns. `expert_offsets`
    and `tiles` are `routing.Routing`'s, `tile` the rows in each of the tiles.
    """
    y = torch.empty(x.shape[0], matrices.shape[2], dtype=x.dtype, device=x.device)
    count = tiles.numel() // 2
    step = _launch(
        tuple(matrices.shape[1:]), tuple(matrices.stride()), x.stride(0), x.dtype, tile, count, cut,
        x.get_device(),
    )  # fmt: skip
    step(x, matrices, tiles, expert_offsets, y, count)
    return y


@triton.jit
def outer_kernel(
    a, b, expert_offsets, out,
    P: tl.constexpr, Q: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (E, P, Q) = a^T b over each expert's rows, of a (R, P) and b (R, Q).

    Program 0: columns of b, in blocks; 1: of a; 2: expert.
    """
    expert = tl.program_id(2)
    start, end = tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    k = tl.arange(0, BK)
    total = tl.zeros([BP, BQ], tl.float32)
    for first in tl.range(start, end, BK, num_stages=STAGES):
        rows = (first + k).to(tl.int64)
        live = first + k < end
        left = a + rows[None, :] * A_STRIDE + p[:, None]
        left = tl.load(left, mask=(p < P)[:, None] & live[None, :], other=0.0)
        right = b + rows[:, None] * B_STRIDE + q[None, :]
        right = tl.load(right, mask=live[:, None] & (q < Q)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    to = out + expert.to(tl.int64) * (P * Q) + p[:, None] * Q + q[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(p < P)[:, None] & (q < Q)[None, :])


def outer(a: Tensor, b: Tensor, expert_offsets: Tensor) -> Tensor:
    """Return `(E, P, Q)`: a^T b over each expert's rows, of a `(R, P)` and b `(R, Q)`.

    Both in rows any distance apart; an expert without rows gets zeros.
    """
    experts = len(expert_offsets) - 1
    out = torch.empty(experts, a.shape[1], b.shape[1], dtype=a.dtype, device=a.device)
    step = _outer_launch(
        experts, a.shape[1], b.shape[1], a.stride(0), b.stride(0), a.dtype, a.get_device()
    )
    step(a, b, expert_offsets, out)
    return out


@lru_cache(maxsize=64)
def _outer_launch(
    experts: int, p: int, q: int, a_stride: int, b_stride: int, dtype: torch.dtype, device: int
) -> Launch:
    most = [min(64, max(16, triton.next_power_of_2(size))) for size in (p, q)]
    return Launch(
        outer_kernel, (cdiv(q, most[1]), cdiv(p, most[0]), experts),
        P=p, Q=q, A_STRIDE=a_stride, B_STRIDE=b_stride, BP=most[0], BQ=most[1], BK=64, STAGES=3,
        num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _launch(
    sizes: tuple[int, int], strides: tuple[int, int, int], stride: int, dtype: torch.dtype,
    tile: int, count: int, cut: Cut, device: int,
) -> Launch:  # fmt: skip
    (inner, out), (across, down, along) = sizes, strides
    assert 1 in (down, along)
    return Launch(
        grouped_kernel, (count * cdiv(out, cut.features),),
        K=inner, N=out, STRIDE=stride, SE=across, SK=down, SN=along, BM=tile, BN=cut.features,
        BK=cut.step, STAGES=cut.stages, GROUP=cut.group, num_warps=cut.warps,
    )  # fmt: skip
