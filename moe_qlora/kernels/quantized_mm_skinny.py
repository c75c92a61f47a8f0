"""The quantized matmul for few rows an expert, as in generation, on all cards from NVIDIA.

Where an expert has a row or two, a product should take no longer than reading its codes. The
portable kernel (`quantized_mm.py`) moves each step's weights through shared memory into the matrix
unit's layout. Here the product is transposed, 64 features by 8 or 16 rows, and each thread looks up
the weights that it multiplies (`quantized_mm_rs.py`). A group of 64 columns is one block or a part
of one, whose 16 values are computed once (`quantized_mm_hopper.py`), so that weights equal the
dequantized ones bit for bit. Rows are loaded in the same order of columns, straight into registers.
Codes are loaded three steps of 256 columns ahead, into shared memory, where each thread reads its
own copies: with loads into registers, to wait for one is to wait for all.

    column 64 g + 16 p + 2 i + j of a step    is multiplied at    64 p + 8 i + 2 g + j
    (groups g < 4, quarters p < 4, i < 8, j < 2)

The matrix unit's instruction (mma.sync) exists on all cards from capability 8.0 on. Measured on an
H200 only, where the lookup, three instructions a weight, is the bottleneck.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere

from . import cards
from .expert_mm import ExpertMatmul, Kernel, Problem
from .launch import Geometry, launcher
from .limits import FEW_TILE, cdiv, supports_quantized, supports_registers
from .quantized_mm import FAILURES, Operands, fall_back, second_level
from .quantized_mm_hopper import block_values, lookup_asm, table_asm
from .quantized_mm_rs import feature, quarters, weights, words_layout
from .routing import Routing, Tiled
from .weights import NF4, WeightSpec

SLOTS: gl.constexpr = gl.constexpr(4)
"""Tiles of codes in shared memory: one being multiplied, three on their way."""

FEATURES, WARPS = 64, 4
REGISTERS = 128
"""Of a thread: four programs a multiprocessor, with 130 three (H200: 0.090 and 0.095 ms)."""


@gluon.constexpr_function
def _copied_layout():
    """(64 rows of the tile, 32 words), as `words_layout` has them: a thread copies its own."""
    reg = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lane = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(reg, lane, [[16, 0], [32, 0]], [], [64, 32])


@gluon.constexpr_function
def _rows_layout(rows):
    """(rows, 4 groups, 16 columns): a thread has a row's columns of a group, each warp all."""
    reg = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]] + ([[8, 0, 0]] if rows == 16 else [])
    lane = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(reg, lane, [[0, 0, 0], [0, 0, 0]], [], [rows, 4, 16])


@gluon.jit
def _absmax(code, outer, table2, offset, NESTED: gl.constexpr):
    """fp32 absmax, as of `grouped_mm.block_absmax`, from the stored values."""
    if NESTED > 0:
        value = gl.load(table2 + code.to(gl.int32)) * outer + gl.load(offset)
    else:
        value = code
    return value


@gluon.jit
def _product(
    x, codes, absmax, table2, absmax2, offset, factor, y, expert, start_row, end_row,
    n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, RANK: gl.constexpr,
    BLOCKSIZE: gl.constexpr, NESTED: gl.constexpr, WIDTH: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr, NR: gl.constexpr,
):  # fmt: skip
    """NR rows of an expert, from `start_row` on, by 64 features."""
    dtype: gl.constexpr = x.dtype.element_ty
    PASSES: gl.constexpr = COLS // 256
    BLOCKS: gl.constexpr = COLS // BLOCKSIZE
    first = n_first + gl.program_id(0) * 64

    # Features beyond the last read the last one; their results are not stored.
    copied: gl.constexpr = _copied_layout()
    f = first + feature(gl.arange(0, 64, gl.SliceLayout(1, copied)))
    f = gl.minimum(f, ROWS - 1)
    word = gl.arange(0, 32, gl.SliceLayout(0, copied))
    spots = codes + expert * (ROWS * COLS // 8) + (f[:, None] * (COLS // 8) + word[None, :])
    # Threads side by side read 16 bytes each from banks of their own.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 32], swizzled)
    for i in gl.static_range(SLOTS - 1):
        if i < PASSES:
            ampere.async_copy.async_copy_global_to_shared(words.index(i), spots + i * 32)
        ampere.async_copy.commit_group()

    part: gl.constexpr = gl.SliceLayout(2, words_layout(64, 2))
    fs = first + feature(gl.arange(0, 64, gl.SliceLayout(1, part)))
    group = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, part)), 0)
    block = expert * (ROWS * BLOCKS) + gl.expand_dims(gl.minimum(fs, ROWS - 1), 1) * BLOCKS
    OUTER: gl.constexpr = NESTED if NESTED > 0 else 1

    at = block + group * 64 // BLOCKSIZE
    code, outer = gl.load(absmax + at), gl.load(absmax2 + at // OUTER)

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    of_rows: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rows_layout: gl.constexpr = _rows_layout(NR)
    # Rows beyond the expert's read its last one; their results are not stored.
    r = start_row + gl.arange(0, NR, gl.SliceLayout(1, gl.SliceLayout(2, rows_layout)))
    r = gl.minimum(r, end_row - 1)
    g = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, rows_layout)))
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, rows_layout)))
    r3, g3 = gl.expand_dims(gl.expand_dims(r, 1), 2), gl.expand_dims(gl.expand_dims(g, 0), 2)
    left = x + (r3.to(gl.int64) * STRIDE + (g3 * 64 + gl.expand_dims(gl.expand_dims(k, 0), 1)))
    coming = gl.load(left)

    total = gl.zeros([64, NR], gl.float32, mma)
    if RANK > 0:  # first, while the first codes are on their way
        n = first + feature(gl.arange(0, 64, gl.SliceLayout(1, of_weights)))
        jj = gl.arange(0, RANK, gl.SliceLayout(0, of_weights))
        place = factor + expert * factor_se + n[:, None] * factor_sn + jj[None, :] * factor_sj
        of_features = gl.load(place, mask=(n < n_end)[:, None], other=0.0)
        row_t = start_row + gl.arange(0, NR, gl.SliceLayout(0, of_rows))
        j_t = gl.arange(0, RANK, gl.SliceLayout(1, of_rows))
        place = x + (row_t.to(gl.int64)[None, :] * STRIDE + COLS + j_t[:, None])
        tail = gl.load(place, mask=(row_t < end_row)[None, :], other=0.0)
        total = ampere.mma_v2(of_features, tail, total)

    for it in range(PASSES):
        # Of the pass after this one; there is always something to read.
        ahead = gl.minimum(it + 1, PASSES - 1)
        values = block_values(_absmax(code, outer, table2, offset, NESTED), TABLE)
        at = block + (ahead * 4 + group) * 64 // BLOCKSIZE
        code, outer = gl.load(absmax + at), gl.load(absmax2 + at // OUTER)
        ampere.async_copy.wait_group(SLOTS - 2)
        parts = quarters(gl.reshape(words.index(it % SLOTS).load(copied), (64, 4, 8)))
        if it + (SLOTS - 1) < PASSES:
            ampere.async_copy.async_copy_global_to_shared(
                words.index((it + (SLOTS - 1)) % SLOTS), spots + (it + (SLOTS - 1)) * 32
            )
        ampere.async_copy.commit_group()
        for p in gl.static_range(4):
            right = gl.reshape(coming, (NR, 4, 4, 2, 2))
            right = gl.reshape(gl.permute(right, (2, 3, 1, 4, 0)), (64, NR))
            right = gl.convert_layout(right, of_rows, assert_trivial=True)
            if p < 3:
                coming = gl.load(left + (it * 256 + (p + 1) * 16))
            else:
                coming = gl.load(left + ahead * 256)
            operand = weights(parts[p], values, dtype, LOOKUP, of_weights)
            total = ampere.mma_v2(operand, right, total)

    n = first + feature(gl.arange(0, 64, gl.SliceLayout(1, mma)))
    row = start_row + gl.arange(0, NR, gl.SliceLayout(0, mma))
    to = y + (row.to(gl.int64)[None, :] * WIDTH + (n - n_first)[:, None])
    value = total.to(dtype)
    gl.store(to, value, mask=(row < end_row)[None, :] & (n < n_end)[:, None])


@gluon.jit
def skinny_kernel(
    x, codes, absmax, table2, absmax2, offset, factor, tiles, expert_offsets, y,
    n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, RANK: gl.constexpr,
    BLOCKSIZE: gl.constexpr, NESTED: gl.constexpr, WIDTH: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr,
):  # fmt: skip
    """Compute `quantized_mm.quantized_kernel` out, in tiles of 16 rows that were copied."""
    pid = gl.program_id(1)
    expert = gl.load(tiles + 2 * pid).to(gl.int64)
    if expert < 0:
        return
    start_row = gl.load(tiles + 2 * pid + 1)
    end_row = gl.load(expert_offsets + expert + 1)
    if end_row - start_row > 8:
        _product(
            x, codes, absmax, table2, absmax2, offset, factor, y, expert, start_row, end_row,
            n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, RANK, BLOCKSIZE, NESTED, WIDTH, TABLE, LOOKUP, 16,
        )  # fmt: skip
    else:
        _product(
            x, codes, absmax, table2, absmax2, offset, factor, y, expert, start_row, end_row,
            n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, RANK, BLOCKSIZE, NESTED, WIDTH, TABLE, LOOKUP, 8,
        )  # fmt: skip


def supports(problem: Problem) -> bool:
    """Whether it sums over whole groups of stored columns of 16-bit rows, in tiles of 16 rows."""
    spec = problem.spec
    if not problem.by_rows or problem.dtype not in cards.HALVES or problem.tile != FEW_TILE:
        return False
    # 0.69 of the portable kernel's time at a row an expert (H200): it reads codes as they come.
    return supports_quantized(spec.shape[2], spec.blocksize) and supports_registers(
        spec.blocksize, spec.shape[2]
    )


def launch(
    x: Tensor, matmul: ExpertMatmul, absmax: Tensor, routing: Routing | Tiled,
    span: tuple[int, int], products: None = None,
) -> Tensor:  # fmt: skip
    """Compute a product as `expert_mm.Kernel` says, in tiles of 16 rows."""
    packed = matmul.packed
    o = Operands.of(x, matmul, absmax, routing, span, None)
    try:
        _launch(
            (packed.spec, x.dtype, x.stride(0), o.rank, len(o.tiles) // 2, o.numbers),
            x, packed.flat_codes.view(torch.int32), absmax, *second_level(packed), o.factor,
            o.tiles, routing.expert_offsets, o.y, *o.numbers[2:],
        )  # fmt: skip
    except FAILURES as error:
        return fall_back(error, "few rows", x, matmul, absmax, routing, span)
    return o.y


@launcher(skinny_kernel)
def _launch(
    spec: WeightSpec, dtype: torch.dtype, stride: int, rank: int, tiles: int,
    numbers: tuple[int, ...],
) -> Geometry:  # fmt: skip
    width = numbers[3] - numbers[2]
    return (cdiv(width, FEATURES), tiles), {
        "ROWS": spec.shape[1], "COLS": spec.shape[2], "STRIDE": stride, "RANK": rank,
        "BLOCKSIZE": spec.blocksize, "NESTED": spec.nested, "WIDTH": width,
        "TABLE": table_asm(spec.kind, dtype), "LOOKUP": lookup_asm(), "num_warps": WARPS,
        "maxnreg": REGISTERS, "enable_fp_fusion": False,
    }  # fmt: skip


KERNEL = Kernel(
    "skinny",
    supports,
    lambda problem: FEW_TILE,
    lambda matmul, routing, span, name: matmul.packed.absmax,  # each program decodes its own
    launch,
    capable=lambda card: card.maker == "nvidia" and card.capability >= (8, 0),
    tried=lambda spec: NF4,
    tried_tiles=(FEW_TILE,),
    both_ways=False,
)
