"""The quantized matmul on Hopper for many rows: weights in registers, for sums over stored columns.

`quantized_mm_hopper.py` stores decoded weights in shared memory, which the matrix unit reads again
for each 64 rows: at 128 rows a tile that is the bottleneck. Here the product is transposed, 128
features by up to 256 rows: weights are the left operand, which may lie in registers, and only rows
are in shared memory. Each weight is looked up once for 256 rows.

A thread has, of two features, one of four groups of 64 columns, which is one block or a part of
one: the block's 16 values are computed once for 64 weights. The matrix unit needs four of each 16
columns in each of four threads, so the rows' columns are reordered before (`reorder_kernel`), which
leaves products the same. Only rows of forward are: backward's gradients of pre-activations are also
multiplied by LoRA's factors, in their own order.

    column 256 b + 64 g + 2 i + j    moves to    256 b + 8 i + 2 g + j    (g < 4, i < 32, j < 2)

The left operand of mma.sync has the same layout in registers as that of wgmma, so that
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import cards
from .gluon_names import async_load, barrier
from .lang import launcher
from .limits import ROWS_IN_REGISTERS, TILE, WIDEST_TILE, cdiv, tile_rows
from .quantized_mm import prepare
from .quantized_mm_hopper import block_values, launch_on, load_tail, look_up, source_rows
from .routing import Routing
from .table import Kernel, Matmul

UNPACK: gl.constexpr = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.constexpr_function
def words_layout(features, words):
    """(features of the tile, 4 groups of 64, words): a thread has two rows' words of a group."""
    reg = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)] + [[8, 0, 0]]
    lane = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warp = [[16 << i, 0, 0] for i in range((features // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [features, 4, words])


@gluon.jit
def feature(m):
    """Feature of a row of the tile: a thread's rows r and r + 8 are neighbours."""
    return (m & 112) | ((m & 7) * 2) | ((m >> 3) & 1)


@gluon.jit
def quarters(words):
    """Words (features, 4, 8) to four parts (features, 4, 2), in order."""
    M: gl.constexpr = words.shape[0]
    P: gl.constexpr = words_layout(M, 2)
    parts = gl.permute(gl.reshape(words, (M, 4, 2, 2, 2)), (0, 1, 4, 3, 2))
    low, high = gl.split(parts)
    w0, w1 = gl.split(low)
    w2, w3 = gl.split(high)
    return (
        gl.convert_layout(w0, P, assert_trivial=True),
        gl.convert_layout(w1, P, assert_trivial=True),
        gl.convert_layout(w2, P, assert_trivial=True),
        gl.convert_layout(w3, P, assert_trivial=True),
    )


@gluon.jit
def weights(words, v, dtype: gl.constexpr, LOOKUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Words (features, 4, 2) and their blocks' values to 64 columns' weights (features, 64)."""
    M: gl.constexpr = words.shape[0]
    pairs = look_up(words, v, 2, LOOKUP)  # row, group, word, and twice 2 of 4 pairs
    pairs = gl.reshape(gl.permute(pairs, (0, 2, 3, 4, 1)), (M, 32))
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            UNPACK, "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            UNPACK, "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.reshape(gl.join(low, high), (M, 64)), LAYOUT, assert_trivial=True)


SLOTS: gl.constexpr = gl.constexpr(4)
"""Tiles of rows in shared memory: two being multiplied, two on their way."""

WARPS = 8


@gluon.constexpr_function
def _out_layout(rows):
    """(rows / 8, 8, 128 features) in the threads of the product, neighbours together."""
    reg = [[0, 0, 1], [0, 1, 0]]
    n = 1
    while n < rows // 8:
        reg.append([n, 0, 0])
        n *= 2
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]
    warp = [[0, 0, 16], [0, 0, 32], [0, 0, 64]]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [rows // 8, 8, 128])


@gluon.jit
def _write(total, y, row, left, feature, NR: gl.constexpr, WIDTH: gl.constexpr):
    OUT: gl.constexpr = _out_layout(NR)
    value = gl.reshape(total.to(y.dtype.element_ty), (8, 2, 8, NR // 8, 8))
    value = gl.reshape(gl.permute(value, (3, 4, 0, 2, 1)), (NR // 8, 8, 128))
    value = gl.convert_layout(value, OUT, assert_trivial=True)
    j = gl.arange(0, NR // 8, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))
    n = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    i3, n3 = gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(n, 0), 1)
    j3 = gl.expand_dims(gl.expand_dims(j, 1), 2)
    corner = y + (row.to(gl.int64) * WIDTH + feature)
    to = corner + (i3 * WIDTH + n3) + j3 * (8 * WIDTH)
    gl.store(to, value, mask=(j3 * 8 < left - i3) & (n3 < WIDTH - feature))


@gluon.jit
def _product(
    x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
    stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    RANK: gl.constexpr, BLOCKSIZE: gl.constexpr, WIDTH: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr, NR: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x.dtype.element_ty
    STEPS: gl.constexpr = COLS // 64
    PASSES: gl.constexpr = COLS // 256
    first = n_first + gl.program_id(0) * 128

    whole: gl.constexpr = words_layout(128, 8)
    part: gl.constexpr = gl.SliceLayout(2, words_layout(128, 2))
    f = first + feature(gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, whole))))
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, whole)))
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, whole)))
    f3, c3 = gl.expand_dims(gl.expand_dims(f, 1), 2), gl.expand_dims(gl.expand_dims(c, 0), 2)
    j3 = gl.expand_dims(gl.expand_dims(j, 0), 1)
    spots = codes + expert * (ROWS * COLS // 8) + (f3 * (COLS // 8) + c3 * 8 + j3)
    here = f3 < ROWS
    fs = first + feature(gl.arange(0, 128, gl.SliceLayout(1, part)))
    group = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, part)), 0)
    blocks = absmax + expert * (ROWS * (COLS // BLOCKSIZE)) + gl.expand_dims(fs, 1) * stride_r
    some = gl.expand_dims(fs, 1) < ROWS

    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rights = gl.allocate_shared_memory(dtype, [SLOTS, NR, 64], shared)
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    row = start_row + gl.arange(0, NR, gl.SliceLayout(1, tile_layout))
    k = gl.arange(0, 64, gl.SliceLayout(0, tile_layout))
    left = x + source_rows(order, row, last_row, TOP_K)[:, None] * STRIDE + k[None, :]
    for i in gl.static_range(SLOTS - 2):
        if i < STEPS:
            async_load(rights.index(i), left + i * 64)
        hopper.async_copy.commit_group()
    words = gl.load(spots, mask=here, other=0)
    scale = gl.load(blocks + group * 64 // BLOCKSIZE * stride_b, mask=some, other=0.0)

    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, NR, 16])
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    total = gl.zeros([128, NR], gl.float32, mma)
    if RANK > 0:  # first, while the first rows are on their way
        tail_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [8, 1], [1, 0])
        small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NR, RANK], dtype)
        row_t = start_row + gl.arange(0, NR, gl.SliceLayout(1, tail_layout))
        j_t = gl.arange(0, RANK, gl.SliceLayout(0, tail_layout))
        tail = load_tail(x, products, row_t, last_row, j_t, COLS, STRIDE, TOP_K, RANK)
        n = first + feature(gl.arange(0, 128, gl.SliceLayout(1, dot)))
        jj = gl.arange(0, RANK, gl.SliceLayout(0, dot))
        place = factor + expert * factor_se + n[:, None] * factor_sn + jj[None, :] * factor_sj
        of_features = gl.load(place, mask=(n < n_end)[:, None], other=0.0)
        tails = gl.allocate_shared_memory(dtype, [NR, RANK], small, tail)
        hopper.fence_async_shared()
        barrier()
        total = hopper.warpgroup_mma(of_features, tails.permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))

    for it in range(PASSES):
        parts = quarters(words)
        values = block_values(scale, TABLE)
        for p in gl.static_range(4):
            step = it * 4 + p
            operand = weights(parts[p], values, dtype, LOOKUP, dot)
            hopper.async_copy.wait_group(SLOTS - 3)
            hopper.fence_async_shared()
            barrier()
            right = rights.index(step % SLOTS).permute((1, 0))
            total = hopper.warpgroup_mma(operand, right, total, is_async=True)
            coming = step + SLOTS - 2
            if coming < STEPS:
                async_load(rights.index(coming % SLOTS), left + coming * 64)
            hopper.async_copy.commit_group()
            if p == 1:
                # Of the next pass; there is always something to read.
                ahead = gl.minimum(it + 1, PASSES - 1)
                words = gl.load(spots + ahead * 32, mask=here, other=0)
                block = (ahead * 4 + group) * 64 // BLOCKSIZE
                scale = gl.load(blocks + block * stride_b, mask=some, other=0.0)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
    total = hopper.warpgroup_mma_wait(0, deps=(total,))
    _write(total, y, start_row, end_row - start_row, first - n_first, NR, WIDTH)


@gluon.jit(do_not_specialize=["last_row"])
def rs_kernel(
    x, order, products, codes, absmax, factor, tiles, expert_offsets, y, last_row,
    stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    RANK: gl.constexpr, BLOCKSIZE: gl.constexpr, WIDTH: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr,
):  # fmt: skip
    """Compute `quantized_mm.quantized_kernel` out, of reordered columns, in tiles of 256 rows."""
    pid = gl.program_id(1)
    expert = gl.load(tiles + 2 * pid).to(gl.int64)
    if expert < 0:
        return
    start_row = gl.load(tiles + 2 * pid + 1)
    end_row = gl.load(expert_offsets + expert + 1)
    # An expert's last tile is often nearly empty.
    if end_row - start_row > 128:
        _product(
            x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
            stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, TOP_K, RANK, BLOCKSIZE, WIDTH, TABLE, LOOKUP, 256,
        )  # fmt: skip
    elif end_row - start_row > 64:
        _product(
            x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
            stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, TOP_K, RANK, BLOCKSIZE, WIDTH, TABLE, LOOKUP, 128,
        )  # fmt: skip
    else:
        _product(
            x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
            stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, TOP_K, RANK, BLOCKSIZE, WIDTH, TABLE, LOOKUP, 64,
        )  # fmt: skip


@triton.jit
def reorder_kernel(x, out, rows, COLS: tl.constexpr, BM: tl.constexpr):
    """out (rows, COLS) in the module's order of columns; x likewise, both as pairs, int32."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    to = tl.arange(0, 128)
    base = row.to(tl.int64)[:, None] * (COLS // 2) + tl.program_id(1) * 128
    live = (row < rows)[:, None] & (to < 128)[None, :]
    value = tl.load(x + base + (to % 4 * 32 + to // 4)[None, :], mask=live)
    tl.store(out + base + to[None, :], value, mask=live)


def reorder(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows `(R, K)` of 16 bits, contiguous, in `limits.ORDER`: in `out`, if it is given."""
    out = torch.empty_like(x) if out is None else out
    rows, columns = x.shape
    launcher(reorder_kernel, (cdiv(rows, 16), columns // 256), x.view(torch.int32))(
        x.view(torch.int32),
        out.view(torch.int32), rows, COLS=columns, BM=16, num_warps=4,
    )  # fmt: skip
    return out


def supports(matmul: Matmul) -> bool:
    """Whether it sums over whole groups of stored columns of 16-bit rows, and is quickest."""
    spec, (least, most) = matmul.packed.spec, ROWS_IN_REGISTERS
    # Backward's gradients of pre-activations meet LoRA's factors too, in their own order.
    if matmul.dtype not in cards.HALVES or not matmul.by_rows or matmul.backward:
        return False
    if tile_rows(matmul.rows, matmul.packed.experts) < TILE:
        return False
    if not least * matmul.packed.experts <= matmul.rows <= most * matmul.packed.experts:
        return False
    # Four threads have a group of 64 columns each, which is one block or part of one. Two rounds
    # of them at least: Triton 3.6 fails on the loop of a single one.
    columns, whole = spec.shape[2], not spec.is_int8 and spec.blocksize % 64 == 0
    return whole and columns % 256 == 0 and columns > 256 and columns % spec.blocksize == 0


def launch(
    x: Tensor, matmul: Matmul, absmax: Tensor, routing: Routing,
    span: tuple[int, int], products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a product as `table.Kernel` says, in tiles of `WIDEST_TILE` rows."""
    cut = {"WIDTH": span[1] - span[0], "num_warps": WARPS}
    return launch_on(rs_kernel, x, matmul, absmax, routing, span, products, **cut)


KERNEL = Kernel(
    "rs_gemm", supports, lambda matmul: WIDEST_TILE, prepare, launch, reorder=reorder, hopper=True
)
