"""Which rows are whose: top-k assignments sorted by expert, and tables of tiles.

A stable counting sort, since experts are few: each block of assignments is counted by expert, the
counts are summed over the blocks before, and each block's assignments placed. The host never reads
the counts, and no sum depends on the order in which programs run. It takes three launches; torch's
sort, search and conversions take some fifteen.

The results are parts of one int32 tensor, so that autograd and a checkpoint save only one.
"""

from functools import cached_property

import torch
from torch import Tensor

from .lang import launcher, tl, triton
from .limits import WIDE_TILE, WIDEST_TILE, cdiv, tile_counts, tile_rows

_BLOCK, _CHUNK = 256, 128
"""Assignments that one program places, and how many of them it compares at once."""

_TILES = 32  # Tiles whose table entries one program writes


@triton.jit
def _experts_of(index, i, rows, E: tl.constexpr, EP: tl.constexpr):
    """Experts of the assignments i, E for ids of no expert, EP - 1 beyond the last."""
    key = tl.load(index + i, mask=i < rows, other=0)
    key = tl.where((key < 0) | (key > E), E, key).to(tl.int32)
    return tl.where(i < rows, key, EP - 1)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(
    index, counts, rows, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """counts[b, e]: how many of the b-th BLOCK assignments are of expert e."""
    pid = tl.program_id(0)
    key = _experts_of(index, pid * BLOCK + tl.arange(0, BLOCK), rows, E, EP)
    tl.store(counts + pid * EP + tl.arange(0, EP), tl.histogram(key, EP))


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(counts, totals, blocks, EP: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr):
    """counts[b, e] becomes the sum over the blocks before b, totals[e] that over all."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for first in range(0, blocks, BB):
        b = first + tl.arange(0, BB)
        spots = counts + b[:, None] * EP + e[None, :]
        some = tl.load(spots, mask=(b < blocks)[:, None], other=0)
        before = tl.cumsum(some, 0) - some + total[None, :]
        tl.store(spots, before, mask=(b < blocks)[:, None])
        total += tl.sum(some, 0)
    tl.store(totals + e, total)


# The counts differ with each sequence's length; specializing on them gains nothing.
@triton.jit(do_not_specialize=["rows", "blocks", "count", "count_wide", "count_widest"])
def sort_kernel(
    index, counts, totals, order, inverse, expert_offsets, tiles, wide, widest,
    rows, blocks, count, count_wide, count_widest,
    E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    WIDEST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """order, inverse, expert_offsets and the tables of tiles, from the sums of `scan_kernel`."""
    pid = tl.program_id(0)
    e = tl.arange(0, EP)
    total = tl.load(totals + e)
    low = tl.cumsum(total, 0) - total
    if pid == 0:
        tl.store(expert_offsets + e, low, mask=e <= E)
    if pid < blocks:
        # From here on this block's row of counts says where its assignments start.
        counts += pid * EP
        tl.store(counts + e, tl.load(counts + e) + low)
        tl.debug_barrier()
        j = tl.arange(0, CHUNK)
        for chunk in range(0, BLOCK, CHUNK):
            i = pid * BLOCK + chunk + j
            key = _experts_of(index, i, rows, E, EP)
            earlier = (key[:, None] == key[None, :]) & (j[None, :] < j[:, None])
            spot = tl.load(counts + key) + tl.sum(earlier.to(tl.int32), 1)
            for other in range(0, chunk, CHUNK):
                past = _experts_of(index, pid * BLOCK + other + j, rows, E, EP)
                spot += tl.sum((key[:, None] == past[None, :]).to(tl.int32), 1)
            tl.store(order + spot, i, mask=i < rows)
            tl.store(inverse + i, spot, mask=i < rows)
    if pid * TB < count:
        _tabulate(low, total, tiles, count, E, EP, TILE, TB)
    if pid * TB < count_wide:
        _tabulate(low, total, wide, count_wide, E, EP, WIDE, TB)
    if pid * TB < count_widest:
        _tabulate(low, total, widest, count_widest, E, EP, WIDEST, TB)


@triton.jit
def _tabulate(
    low, total, tiles, count,
    E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr, TB: tl.constexpr,
):  # fmt: skip
    """For each of this program's tiles (expert, first row), -1 where there is none."""
    e = tl.arange(0, EP)
    n = tl.where(e < E, (total + TILE - 1) // TILE, 0)
    last = tl.cumsum(n, 0)
    tile = tl.program_id(0) * TB + tl.arange(0, TB)
    expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = e[None, :] == expert[:, None]
    start = tl.sum(tl.where(mine, (low - (last - n) * TILE)[None, :], 0), 1)
    some = expert < E
    tl.store(tiles + 2 * tile, tl.where(some, expert, -1), mask=tile < count)
    tl.store(tiles + 2 * tile + 1, start + tile * TILE, mask=(tile < count) & some)


class Routing:
    """Which sorted rows are which expert's: parts of `ints`, each from a multiple of 4.

    order: `(R,)`, and up to 3 more: the assignment (token x k + slot) in each row; inverse:
    as long, the row of each assignment; expert_offsets: `(E + 1,)`, and up to 3 more: rows
    [offsets[e], offsets[e + 1]) are e's; tiles: `(2 n,)`: expert and first row of each tile in
    turn, an expert of -1 for none; wide: the same of `WIDE_TILE` rows, widest: of `WIDEST_TILE`,
    both empty where experts have too few. `tile` is the rows in a tile, `counts` how many tiles of
    each kind there is room for.
    """

    def __init__(self, ints: Tensor, count: int, experts: int, top_k: int) -> None:
        self.ints, self.count, self.experts, self.top_k = ints, count, experts, top_k  # R, E, k
        self.tile, self.counts, sizes = _sizes(count, experts)
        parts = ints[: sum(sizes)].split_with_sizes(sizes)
        self.order, self.inverse, self.expert_offsets, self.tiles, self.wide, self.widest = parts

    @cached_property
    def ends(self) -> Tensor:
        """`(E,)`: as torch's grouped product wants them."""
        return self.expert_offsets[1 : self.experts + 1]

    def table(self, tile: int) -> Tensor:
        """Return the table of tiles of `tile` rows."""
        if tile == self.tile:
            return self.tiles
        return self.wide if tile == WIDE_TILE else self.widest


def _sizes(count: int, experts: int) -> tuple[int, tuple[int, int, int], list[int]]:
    tile = tile_rows(count, experts)
    some, wide, widest = (cdiv(n, 2) * 2 for n in tile_counts(count, experts, tile))
    whole = [cdiv(n, 4) * 4 for n in (count, count, experts + 1)]
    return tile, (some, wide, widest), [*whole, 2 * some, 2 * wide, 2 * widest]


def ints_size(count: int, experts: int) -> int:
    """Return the length of `Routing.ints`, of which a few may be left over.

    Without a comparison: a compiler asks with a symbol for the count, and would compile once for
    each size of tiles. There are most tiles of 16 rows, or of `TILE` and two tables of wide ones.
    """
    return 2 * count + experts + 2 * (count // 16 + 3 * experts) + 32


def route(index: Tensor, experts: int) -> Routing:
    """Sort top-k assignments `(T, k)`, integer and contiguous, by expert, stably.

    Ids of no expert come last. At most `limits.MAX_EXPERTS` experts.
    """
    count = index.numel()
    ints = torch.empty(ints_size(count, experts), dtype=torch.int32, device=index.device)
    routing = Routing(ints, count, experts, index.shape[-1])
    # One bin for ids of no expert, one beyond the last assignment.
    bins = triton.next_power_of_2(experts + 2)
    blocks, together = cdiv(count, _BLOCK), min(bins, 8)
    room = torch.empty((blocks + 1) * bins, dtype=torch.int32, device=index.device)
    totals, counts = room.split_with_sizes([bins, blocks * bins])
    launcher(count_kernel, (blocks,), index)(index, counts, count, E=experts, EP=bins, BLOCK=_BLOCK)
    launcher(scan_kernel, (bins // together,), counts)(
        counts, totals, blocks, EP=bins, BE=together, BB=256
    )
    launcher(sort_kernel, (max(1, blocks, *(cdiv(n, _TILES) for n in routing.counts)),), index)(
        index, counts, totals, routing.order, routing.inverse, routing.expert_offsets,
        routing.tiles, routing.wide, routing.widest, count, blocks, *routing.counts,
        E=experts, EP=bins, TILE=routing.tile, WIDE=WIDE_TILE, WIDEST=WIDEST_TILE, BLOCK=_BLOCK,
        CHUNK=_CHUNK, TB=_TILES,
    )  # fmt: skip
    return routing
