"""Codes and absmax to 16 or 32 bit in one pass, by Triton; the LoRA factors beside the weights.

A group of 8 weights is one 32-bit word of codes; it never straddles a row or a block. The value of
a code comes from a 16-entry table (which stays in the first cache), times its block's absmax in
fp32, rounded once: what bitsandbytes' kernel computes, bit for bit. A product and a sum stay apart
(no fused multiply-add), since bitsandbytes adds the offset of a nested absmax in a step of its own.

Bytes moved a weight, nf4 with double quantization to bf16: 0.516 read, 2 written.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .limits import cdiv
from .weights import PackedWeight, WeightSpec

BLOCK = 256
UNROLL = 1
WARPS = 4


@triton.jit
def block_absmax(absmax, table2, absmax2, offset, block, live, NESTED: tl.constexpr):
    """fp32 absmax of these blocks; NESTED is the second level's block size, 0 without one."""
    if NESTED > 0:
        code = tl.load(absmax + block, mask=live, other=0).to(tl.int32)
        outer = tl.load(absmax2 + block // NESTED, mask=live, other=0.0)
        value = tl.load(table2 + code) * outer + tl.load(offset)
    else:  # one return: Triton wants the dtypes of all to agree, also of those not taken
        value = tl.load(absmax + block, mask=live, other=0.0)
    return value


@triton.jit
def _copy_factor(out, source, stride_r, stride_c, out_stride, first, total, WIDTH, N: tl.constexpr):
    """out[i // WIDTH, i % WIDTH] = source[the same] for i in [first, first + N)."""
    i = first + tl.arange(0, N)
    live = i < total
    row, col = i // WIDTH, i % WIDTH
    value = tl.load(source + row * stride_r + col * stride_c, mask=live, other=0.0)
    tl.store(out + row * out_stride + col, value.to(out.dtype.element_ty), mask=live)


# A copied factor is read in any strides; of the rest nothing gains from knowing more.
@triton.jit(
    do_not_specialize=["first_expert", "first_row", "first_col", "right_se", "right_sr", "right_sc",
                       "below_se", "below_sr", "below_sc"]
)  # fmt: skip
def _decode_kernel(
    out, words, absmax, table, table2, absmax2, offset, expert_offsets, right, below,
    first_expert, first_row, first_col,
    right_se, right_sr, right_sc, below_se, below_sr, below_sc,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLS: tl.constexpr,
    RANK_R: tl.constexpr, RANK_B: tl.constexpr, STRIDE: tl.constexpr,
    BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr, INT8: tl.constexpr, SKIP: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One expert's matrix (program 1) in pieces of BLOCK x UNROLL groups of 8 weights (program 0).

    out: (E', ROWS + RANK_B, COLS + RANK_R), rows STRIDE apart, of weights (E, ALL_ROWS, ALL_COLS);
    right: (E, ROWS, RANK_R); below: (E, RANK_B, COLS).
    """
    GROUPS: tl.constexpr = ROWS * COLS // 8
    PIECES: tl.constexpr = (GROUPS + BLOCK * UNROLL - 1) // (BLOCK * UNROLL)
    piece = tl.program_id(0)
    local = tl.program_id(1)
    expert = first_expert + local
    if SKIP:
        if tl.load(expert_offsets + expert) == tl.load(expert_offsets + expert + 1):
            return
    expert = expert.to(tl.int64)
    out += local.to(tl.int64) * ((ROWS + RANK_B) * STRIDE)
    if piece < PIECES:
        eighth = tl.arange(0, 8)
        for i in tl.static_range(UNROLL):
            group = (piece * UNROLL + i) * BLOCK + tl.arange(0, BLOCK)
            live = group < GROUPS
            row = group // (COLS // 8)
            whole_row = first_row + row
            at = expert * (ALL_ROWS * ALL_COLS // 8) + whole_row * (ALL_COLS // 8)
            at += first_col // 8 + group % (COLS // 8)
            if INT8:
                place = (at * 8)[:, None] + eighth[None, :]
                value = tl.load(words + place, mask=live[:, None], other=0).to(tl.float32)
                scale = tl.load(absmax + expert * ALL_ROWS + whole_row, mask=live, other=0.0)
                value = value * scale[:, None] * 7.874015718698502e-3
            else:
                word = tl.load(words + at, mask=live, other=0)
                block = at // (BLOCKSIZE // 8)
                scale = block_absmax(absmax, table2, absmax2, offset, block, live, NESTED)
                # The first weight of a byte is its high half.
                nibble = (word[:, None] >> ((eighth ^ 1) * 4)[None, :]) & 15
                value = tl.load(table + nibble) * scale[:, None]
            to = group * 8 + row * (STRIDE - COLS)
            spots = out + to[:, None] + eighth[None, :]
            tl.store(spots, value.to(out.dtype.element_ty), mask=live[:, None])
    else:
        first = (piece - PIECES) * (BLOCK * 8)
        if RANK_R > 0:
            if first < ROWS * RANK_R:
                _copy_factor(
                    out + COLS, right + expert * right_se, right_sr, right_sc, STRIDE, first,
                    ROWS * RANK_R, RANK_R, BLOCK * 8,
                )  # fmt: skip
        if RANK_B > 0:
            if first < RANK_B * COLS:
                _copy_factor(
                    out + ROWS * STRIDE, below + expert * below_se, below_sr, below_sc, STRIDE,
                    first, RANK_B * COLS, COLS, BLOCK * 8,
                )  # fmt: skip


def decode(
    packed: PackedWeight,
    out: Tensor,
    *,
    first: int = 0,
    corner: tuple[int, int] = (0, 0),
    expert_offsets: Tensor | None = None,
    right: Tensor | None = None,
    below: Tensor | None = None,
) -> None:
    """Decode experts [first, first + len(out)), or a part of each, into `out`.

    `packed.dequantizes()` holds, and all tensors start at multiples of 16 bytes. `out` is `(E',
    rows + r_b, cols + r_r)`, bf16, fp16 or fp32, in rows any distance apart; rows and cols are the
    weight's, or fewer, from `corner` on, whose column is a multiple of 8. `expert_offsets` `(E +
    1,)` leave out experts without rows; None decodes all. `right` `(E, rows, r_r)` and `below` `(E,
    r_b, cols)`, of any strides, are written beside each matrix.
    """
    assert out.stride(0) == out.shape[1] * out.stride(1) and out.stride(2) == 1
    nested = packed.nested
    none = packed.absmax
    table2, absmax2, offset, _ = nested if nested is not None else (none, none, none, 0)
    step = _decode_launch(
        packed.spec, tuple(out.shape), out.stride(1), corner, expert_offsets is not None, out.dtype,
        None if right is None else (right.shape[2], right.dtype),
        None if below is None else (below.shape[1], below.dtype),
    )  # fmt: skip
    step(
        out, packed.flat_codes if packed.kind == "int8" else packed.flat_codes.view(torch.int32),
        packed.absmax, none if packed.table is None else packed.table,
        table2, absmax2, offset, none if expert_offsets is None else expert_offsets,
        out if right is None else right, out if below is None else below,
        first, *corner, *((0, 0, 0) if right is None else right.stride()),
        *((0, 0, 0) if below is None else below.stride()),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _decode_launch(
    spec: WeightSpec, shape: tuple[int, int, int], stride: int, corner: tuple[int, int],
    skips: bool, dtype: torch.dtype, right: tuple[int, torch.dtype] | None,
    below: tuple[int, torch.dtype] | None,
) -> Launch:  # fmt: skip
    rank_r = 0 if right is None else right[0]
    rank_b = 0 if below is None else below[0]
    experts, rows, cols = shape[0], shape[1] - rank_b, shape[2] - rank_r
    assert cols % 8 == 0 and corner[1] % 8 == 0
    assert corner[0] + rows <= spec.shape[1] and corner[1] + cols <= spec.shape[2]
    pieces = cdiv(rows * cols // 8, BLOCK * UNROLL)
    extra = cdiv(max(rows * rank_r, rank_b * cols), BLOCK * 8)
    return Launch(
        _decode_kernel, (pieces + extra, experts),
        ROWS=rows, COLS=cols, ALL_ROWS=spec.shape[1], ALL_COLS=spec.shape[2],
        RANK_R=rank_r, RANK_B=rank_b, STRIDE=stride,
        BLOCKSIZE=spec.blocksize, NESTED=spec.nested, INT8=spec.kind == "int8", SKIP=skips,
        BLOCK=BLOCK, UNROLL=UNROLL, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
