"""The quantized matmul on Hopper: weights are decoded while the matrix unit multiplies others.

Triton waits for a product whose operand was computed in the same step. Here a step's product is
asynchronous; during it the next step's weights are looked up and stored into another buffer. Each
thread has groups of 64 weights of a row, which are (part of) one block or two blocks of 32, and
computes a block's 16 possible values (a code's value times the block's absmax, rounded) once:
looking up a weight is then two or three instructions, and bit for bit the dequantized value.

Written in Gluon, where layouts and copies are explicit that Triton's compiler otherwise chooses.
Forward's products of many rows use `quantized_mm_rs.py`; everywhere else the portable kernel of
`quantized_mm.py` runs.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import cards
from .gluon_names import async_load, barrier, reinterpret
from .lang import launcher
from .limits import (
    TILE,
    WIDE_TILE,
    cdiv,
    prefers_quantized,
    supports_quantized,
    tile_rows,
    wide_tile,
)
from .quantized_mm import Arguments, prepare
from .routing import Routing
from .table import Kernel, Matmul
from .weights import TABLES

SLOTS: gl.constexpr = gl.constexpr(4)
"""Tiles of rows in shared memory: two being multiplied, two on their way."""

WORDS: gl.constexpr = gl.constexpr(3)
"""Tiles of codes: one being looked up, two on their way. (Four and two programs would not fit.)"""

BUFFERS: gl.constexpr = gl.constexpr(2)  # Tiles of weights: one being written, one being multiplied

STEP: gl.constexpr = gl.constexpr(64)
FEATURES, WARPS = 128, 4
"""Of a program. 256 features by 8 warps are as quick out and slower back; 256 rows are slower."""


@cache
def table_asm(kind: str, dtype: torch.dtype) -> str:
    """PTX: an fp32 absmax ($8) to a block's 16 values: low bytes ($0 to $3) and high ($4 to $7)."""
    kind_of = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    values = torch.tensor(TABLES[kind], dtype=torch.float32).view(torch.int32).tolist()
    lines = [".reg .f32 a, b;", ".reg .b32 p, q;"]
    for word in range(4):
        for pair, name in ((2 * word, "p"), (2 * word + 1, "q")):
            low, high = (values[2 * pair + i] & 0xFFFFFFFF for i in range(2))
            lines += [
                f"mul.rn.f32 a, $8, 0f{low:08X}; mul.rn.f32 b, $8, 0f{high:08X};",
                f"cvt.rn.{kind_of}.f32 {name}, b, a;",
            ]
        lines += [f"prmt.b32 ${word}, p, q, 0x6420;", f"prmt.b32 ${4 + word}, p, q, 0x7531;"]
    return "{\n" + "\n".join(lines) + "\n}"


@cache
def lookup_asm() -> str:
    """PTX: 8 codes ($12) to 4 pairs of 16-bit values ($0 to $3), out of a block's 16 ($4 to $11).

    `prmt` picks 4 bytes out of 8 by the low 3 bits of 4 codes: once among the values of codes below
    8, once among the others, and once more between both, by the codes' high bits.
    """
    lines = [
        ".reg .b32 s, t, x, y, l, h;",
        "and.b32 s, $12, 0x77777777;",
        "shr.u32 t, $12, 1;",
        "lop3.b32 t, t, 0x44444444, 0x32103210, 0xea;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
        for name, first in (("l", 4), ("h", 8)):
            lines += [
                f"prmt.b32 x, ${first}, ${first + 1}, s;",
                f"prmt.b32 y, ${first + 2}, ${first + 3}, s;",
                f"prmt.b32 {name}, x, y, t;",
            ]
        # A byte's high half is the first of two neighbours: codes come as 1, 0, 3, 2.
        lines += [
            f"prmt.b32 ${2 * half}, l, h, 0x4051;",
            f"prmt.b32 ${2 * half + 1}, l, h, 0x6273;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def block_values(scale, TABLE: gl.constexpr):
    """The 16 values of each block, by its absmax, as `table_asm` has them."""
    return gl.inline_asm_elementwise(
        TABLE, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,f", [scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def look_up(words, v, AXIS: gl.constexpr, LOOKUP: gl.constexpr):
    """Words and their blocks' values, which lack AXIS, to pairs of 16-bit weights (..., 2, 2)."""
    a, b, c, d = gl.inline_asm_elementwise(
        LOOKUP, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [
            gl.expand_dims(v[0], AXIS), gl.expand_dims(v[1], AXIS), gl.expand_dims(v[2], AXIS),
            gl.expand_dims(v[3], AXIS), gl.expand_dims(v[4], AXIS), gl.expand_dims(v[5], AXIS),
            gl.expand_dims(v[6], AXIS), gl.expand_dims(v[7], AXIS), words,
        ],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def source_rows(order, row, last_row, TOP_K: gl.constexpr):
    """Rows of x that are sorted rows: of tokens, where TOP_K.

    Rows beyond the expert's are others', and not stored; beyond the last there is none.
    """
    row = gl.minimum(row, last_row)
    if TOP_K > 0:
        row = gl.load(order + row) // TOP_K
    return row.to(gl.int64)


@gluon.jit
def load_tail(
    x, products, row, last_row, j, K: gl.constexpr, STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    RANK: gl.constexpr,
):  # fmt: skip
    """The sorted rows' products with a factor: x's last columns, or `products` where TOP_K."""
    safe = gl.minimum(row, last_row).to(gl.int64)
    if TOP_K > 0:
        tail = gl.load(products + safe[:, None] * RANK + j[None, :])
    else:
        tail = gl.load(x + safe[:, None] * STRIDE + K + j[None, :])
    return tail


@gluon.constexpr_function
def _half_layout(warps):
    """A thread has the 4 words of one block of 32."""
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def _values(words, scale, second, R: gl.constexpr, BLOCKSIZE: gl.constexpr,
            TABLE: gl.constexpr, LOOKUP: gl.constexpr):  # fmt: skip
    """Words of N groups (N, 8) and absmax (N,) to pairs of 16-bit weights (R, 32 N / R), int32.

    Where a group is two blocks, `second` is the second one's absmax. Groups lie column by column:
    threads side by side then store rows side by side, which are in different banks.
    """
    N: gl.constexpr = words.shape[0]
    NB: gl.constexpr = N // R
    if BLOCKSIZE == 32:
        half: gl.constexpr = _half_layout(gl.num_warps())
        left, right = gl.split(gl.permute(gl.reshape(words, (N, 2, 4)), (0, 2, 1)))
        left = look_up(gl.convert_layout(left, half), block_values(scale, TABLE), 1, LOOKUP)
        right = look_up(gl.convert_layout(right, half), block_values(second, TABLE), 1, LOOKUP)
        both = gl.join(gl.reshape(left, (N, 16)), gl.reshape(right, (N, 16)))
        pairs = gl.permute(both, (0, 2, 1))
    else:
        pairs = look_up(words, block_values(scale, TABLE), 1, LOOKUP)
    return gl.reshape(gl.permute(gl.reshape(pairs, (NB, R, 32)), (1, 0, 2)), (R, NB * 32))


@gluon.jit
def _block(n, first, R: gl.constexpr, BACK: gl.constexpr):
    """Row, and block of 64 columns, of the n-th block of a tile of weights in its first step."""
    r, b = n % R, n // R
    if BACK:
        b += first // 64
    else:
        r += first
    return r, b


@gluon.jit
def _copy(
    left, spots, here, block, some, stride_r, stride_b, lefts, words, scales, seconds, step,
    stride_w, BACK: gl.constexpr, BLOCKSIZE: gl.constexpr,
):  # fmt: skip
    group = step * STEP
    ahead = group * stride_r if BACK else (group // BLOCKSIZE) * stride_b
    async_load(lefts.index(step % SLOTS), left + group)
    async_load(words.index(step % WORDS), spots + step * stride_w, mask=here)
    async_load(scales.index(step % WORDS), block + ahead, mask=some)
    if BLOCKSIZE == 32:
        async_load(seconds.index(step % WORDS), block + ahead + stride_b, mask=some)


@gluon.jit
def _product(
    x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
    stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    RANK: gl.constexpr, BACK: gl.constexpr, BLOCKSIZE: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = x.dtype.element_ty
    K: gl.constexpr = ROWS if BACK else COLS
    R: gl.constexpr = STEP if BACK else BN  # rows and blocks of a tile of weights
    NB: gl.constexpr = BN // 64 if BACK else 1
    BLOCKS: gl.constexpr = COLS // BLOCKSIZE
    first = n_first + gl.program_id(0) * BN

    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    row = start_row + gl.arange(0, BM, gl.SliceLayout(1, tile_layout))
    k = gl.arange(0, STEP, gl.SliceLayout(0, tile_layout))
    left = x + source_rows(order, row, last_row, TOP_K)[:, None] * STRIDE + k[None, :]

    # A thread looks up one block of 64 weights, 8 words. They are copied by two threads each, whole
    # sectors at a time (a thread alone: 8 conflicts a copy), and lie in shared memory so that 8
    # threads read at once from different banks.
    BLOCK_ROWS: gl.constexpr = R * NB
    word_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    block_layout: gl.constexpr = gl.SliceLayout(1, word_layout)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [W, 1], [1, 0])
    r, b = _block(gl.arange(0, BLOCK_ROWS, block_layout), first, R, BACK)
    some = (r < ROWS) & (b < COLS // 64)
    block = expert * (ROWS * BLOCKS) + r * stride_r + (b * 64) // BLOCKSIZE * stride_b
    r, b = _block(gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, copy_layout)), first, R, BACK)
    word = expert * (ROWS * COLS // 8) + r * (COLS // 8) + b * 8
    spots = codes + word[:, None] + gl.arange(0, 8, gl.SliceLayout(0, copy_layout))[None, :]
    here = ((r < ROWS) & (b < COLS // 64))[:, None]
    # A step goes 64 stored rows on, or one group of 64 columns.
    stride_w: gl.constexpr = STEP * COLS // 8 if BACK else 8

    left_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    right_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pairs_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    lefts = gl.allocate_shared_memory(dtype, [SLOTS, BM, STEP], left_layout)
    rights = gl.allocate_shared_memory(dtype, [BUFFERS, R, NB * 64], right_layout)
    pairs = reinterpret(rights, gl.int32, [BUFFERS, R, NB * 32], pairs_layout)

    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 4, 2, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [WORDS, BLOCK_ROWS, 8], swizzled)
    scales = gl.allocate_shared_memory(gl.float32, [WORDS, BLOCK_ROWS], flat)
    # Of groups that are two blocks of 32, the second ones' absmax.
    seconds = scales
    if BLOCKSIZE == 32:
        seconds = gl.allocate_shared_memory(gl.float32, [WORDS, BLOCK_ROWS], flat)
    own_layout: gl.constexpr = _half_layout(W) if BLOCKSIZE == 32 else word_layout
    scale_layout: gl.constexpr = gl.SliceLayout(1, own_layout)

    STEPS: gl.constexpr = K // STEP
    for j in gl.static_range(SLOTS - 2):
        if j < STEPS:
            _copy(left, spots, here, absmax + block, some, stride_r, stride_b, lefts, words,
                  scales, seconds, j, stride_w, BACK, BLOCKSIZE)  # fmt: skip
        hopper.async_copy.commit_group()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BN, 16])
    total = gl.zeros([BM, BN], gl.float32, mma)
    for step in range(STEPS):
        hopper.async_copy.wait_group(SLOTS - 3)
        codes_now = words.index(step % WORDS).load(word_layout)
        scale_now = scales.index(step % WORDS).load(scale_layout)
        second_now = scale_now
        if BLOCKSIZE == 32:
            second_now = seconds.index(step % WORDS).load(scale_layout)
        values = _values(codes_now, scale_now, second_now, R, BLOCKSIZE, TABLE, LOOKUP)
        # Here all warps have waited for the product before the last, which read this buffer.
        barrier()
        pairs.index(step % BUFFERS).store(values)
        hopper.fence_async_shared()
        barrier()
        right = rights.index(step % BUFFERS)
        if not BACK:
            right = right.permute((1, 0))
        total = hopper.warpgroup_mma(lefts.index(step % SLOTS), right, total, is_async=True)
        coming = step + SLOTS - 2
        if coming < STEPS:
            _copy(left, spots, here, absmax + block, some, stride_r, stride_b, lefts, words,
                  scales, seconds, coming, stride_w, BACK, BLOCKSIZE)  # fmt: skip
        hopper.async_copy.commit_group()
        total = hopper.warpgroup_mma_wait(1, deps=(total,))
    total = hopper.warpgroup_mma_wait(0, deps=(total,))

    if RANK > 0:
        barrier()
        small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, RANK], dtype)
        tail_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [W, 1], [1, 0])
        row = start_row + gl.arange(0, BM, gl.SliceLayout(1, tail_layout))
        n = first + gl.arange(0, BN, gl.SliceLayout(1, tail_layout))
        j = gl.arange(0, RANK, gl.SliceLayout(0, tail_layout))
        tail = load_tail(x, products, row, last_row, j, K, STRIDE, TOP_K, RANK)
        place = factor + expert * factor_se + n[:, None] * factor_sn + j[None, :] * factor_sj
        f = gl.load(place, mask=(n < n_end)[:, None], other=0.0)
        tails = gl.allocate_shared_memory(dtype, [BM, RANK], small, tail)
        factors = gl.allocate_shared_memory(dtype, [BN, RANK], small, f)
        hopper.fence_async_shared()
        barrier()
        total = hopper.warpgroup_mma(tails, factors.permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))

    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    value = gl.convert_layout(total.to(dtype), out_layout)
    row = start_row + gl.arange(0, BM, gl.SliceLayout(1, out_layout))
    n = first + gl.arange(0, BN, gl.SliceLayout(0, out_layout))
    to = y + row.to(gl.int64)[:, None] * (n_end - n_first) + (n - n_first)[None, :]
    gl.store(to, value, mask=(row < end_row)[:, None] & (n < n_end)[None, :])


@gluon.jit(do_not_specialize=["last_row"])
def hopper_kernel(
    x, order, products, codes, absmax, factor, tiles, expert_offsets, y, last_row,
    stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, TOP_K: gl.constexpr,
    RANK: gl.constexpr, BACK: gl.constexpr, BLOCKSIZE: gl.constexpr, TABLE: gl.constexpr,
    LOOKUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Compute `quantized_mm.quantized_kernel`, of 4-bit codes as words, in whole steps."""
    pid = gl.program_id(1)
    expert = gl.load(tiles + 2 * pid).to(gl.int64)
    if expert < 0:
        return
    start_row = gl.load(tiles + 2 * pid + 1)
    end_row = gl.load(expert_offsets + expert + 1)
    # An expert's last tile is often nearly empty: half of one costs half of the product.
    if end_row - start_row > 64 or BM == 64:
        _product(
            x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
            stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, TOP_K, RANK, BACK, BLOCKSIZE, TABLE, LOOKUP, BM, BN,
        )  # fmt: skip
    else:
        _product(
            x, order, products, codes, absmax, factor, y, expert, start_row, end_row, last_row,
            stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
            ROWS, COLS, STRIDE, TOP_K, RANK, BACK, BLOCKSIZE, TABLE, LOOKUP, 64, BN,
        )  # fmt: skip


def supports(matmul: Matmul) -> bool:
    """Whether 16-bit rows in tiles of 64 and more are whole steps, and this kernel is quickest."""
    spec, few = matmul.packed.spec, tile_rows(matmul.rows, matmul.packed.experts) < TILE
    if few or matmul.dtype not in cards.HALVES or spec.is_int8:
        return False
    if not supports_quantized(spec.shape[2], spec.blocksize):
        return False
    # Whole steps of 64: a thread looks up 64 weights of a row. Two steps at least: Triton 3.6 fails
    # on the loop of a single one.
    if matmul.inner % 64 or spec.shape[2] % 64 or matmul.inner < 128:
        return False
    # Up to 512 rows an expert, half of that where dequantizing would serve two products
    # (`limits.ROWS_ON_QUANTIZED_HOPPER`).
    return prefers_quantized(matmul.rows, matmul.packed.experts, hopper=not matmul.reused)


def launch(
    x: Tensor, matmul: Matmul, absmax: Tensor, routing: Routing,
    span: tuple[int, int], products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a product as `table.Kernel` says."""
    cut = {"BACK": not matmul.by_rows, "BM": matmul.tile, "BN": FEATURES, "num_warps": WARPS}
    return launch_on(hopper_kernel, x, matmul, absmax, routing, span, products, **cut)


def launch_on(
    kernel: Any, x: Tensor, matmul: Matmul, absmax: Tensor, routing: Routing,
    span: tuple[int, int], products: Tensor | None, **cut: int,
) -> Tensor:  # fmt: skip
    """Launch one of Hopper's two kernels."""
    codes = matmul.packed.flat_codes.view(torch.int32)
    o = Arguments.from_matmul(x, matmul, absmax, routing, span, products)
    launcher(kernel, (cdiv(span[1] - span[0], FEATURES), len(o.tiles) // 2), x)(
        x, o.order, o.products, codes, absmax, o.factor, o.tiles, routing.expert_offsets, o.y,
        routing.count - 1, *o.numbers, **o.constants,
        TABLE=table_asm(matmul.packed.spec.kind, x.dtype), LOOKUP=lookup_asm(), **cut,
    )  # fmt: skip
    return o.y


KERNEL = Kernel(
    "hopper",
    supports,
    # 128 rows by far fewer rows an expert than the portable kernel.
    lambda matmul: wide_tile(matmul.rows, matmul.packed.experts, WIDE_TILE, least=TILE),
    prepare,
    launch,
    hopper=True,
)
