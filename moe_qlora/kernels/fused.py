"""Grouped product straight on 4-bit codes, for few rows an expert: y = x W^T + (s x A^T) B^T.

Where an expert has few rows, a layer costs what its weights' bytes cost. The codes are read once
(0.516 bytes a weight) and turned into matrix operands in registers, in the place of 2 bytes written
and 2 read again on the way through scratch.

W is the left operand, so that its 64 or more rows fill the matrix unit's tall side and the few
tokens its short one. A byte holds two neighbours along the contraction: its high halves make one
operand, its low halves another, and x comes split the same way, even columns before odd ones.
A code's value is its table's in bf16; blocks are summed apart and scaled by their fp32 absmax, so
that a weight is rounded once, as decoding rounds it, though not at the same place.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode import block_absmax
from .packed import Packed

TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
        0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
"""The codes' values, as bitsandbytes' `get_4bit_type` gives them."""


class Config(NamedTuple):
    """How the kernel is cut.

    Attributes:
        block: Rows of W in a program.
        unroll: Blocks of 64 weights along the contraction in a step.
        stages: Steps loaded ahead.
        warps: Warps in a program.
    """

    block: int
    unroll: int
    stages: int
    warps: int


@cache
def lookup_asm(kind: str, dtype: torch.dtype) -> str:
    """PTX: 4 bytes of codes ($4) to their high halves' values ($0, $1) and low halves' ($2, $3).

    `prmt` picks 4 bytes out of 8 by 4 nibbles, so that 4 codes at a time look up one of the two
    bytes of their values: once among the codes below 8, once among the others, and the codes' high
    bits choose between the two.
    """
    values = torch.tensor(TABLES[kind], dtype=torch.float32).to(dtype)
    bits = [b & 0xFFFF for b in values.view(torch.int16).tolist()]

    def pool(plane: int, first: int) -> str:
        word = sum(((bits[first + i] >> (8 * plane)) & 255) << (8 * i) for i in range(4))
        return f"0x{word:08x}"

    lines = [
        ".reg .b32 s, h, m, a, b, x, y, p0, p1;",
        "and.b32 s, $4, 0x77777777;",
        "shr.u32 h, $4, 3;",
        "and.b32 h, h, 0x11111111;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.u32 s, s, 16;", "shr.u32 h, h, 16;"]
        lines.append("prmt.b32 m, 0x0000ff00, 0, h;")
        for plane in range(2):
            low, high = (pool(plane, 0), pool(plane, 4)), (pool(plane, 8), pool(plane, 12))
            lines += [
                f"mov.b32 a, {low[0]}; mov.b32 b, {low[1]}; prmt.b32 x, a, b, s;",
                f"mov.b32 a, {high[0]}; mov.b32 b, {high[1]}; prmt.b32 y, a, b, s;",
                f"lop3.b32 p{plane}, x, y, m, 0xd8;",
            ]
        lines += [f"prmt.b32 ${half}, p0, p1, 0x7351;", f"prmt.b32 ${2 + half}, p0, p1, 0x6240;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _halves(codes, table, like, ASM: tl.constexpr):
    """Bytes -> values of their high and of their low halves."""
    dtype = like.dtype.element_ty
    if len(ASM) > 0:
        high, low = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(like.dtype.element_ty, like.dtype.element_ty),
            is_pure=True,
            pack=4,
        )
    else:
        wide = codes.to(tl.int32)
        high, low = tl.load(table + (wide >> 4)).to(dtype), tl.load(table + (wide & 15)).to(dtype)
    return high, low


@triton.jit
def absmax_kernel(
    absmax, table2, absmax2, offset, bounds, out, blocks,
    NESTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A nested absmax in fp32, of the experts that have rows."""
    expert = tl.program_id(1)
    if tl.load(bounds + expert) == tl.load(bounds + expert + 1):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < blocks
    at = expert.to(tl.int64) * blocks + i
    value = block_absmax(absmax, table2, absmax2, offset, at, live, NESTED)
    tl.store(out + at, value, mask=live)


@triton.jit
def fused_kernel(
    x, codes, absmax, table, factor, tiles, bounds, y,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, ASM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (R, N) = x W^T: x (R, K + RANK) with even columns before odd ones, codes (E, N, K / 2).

    absmax (E, N, K / 64) fp32, factor (E, N, RANK). Program 0: N, in blocks; 1: tile of rows.
    """
    pid = tl.program_id(1)
    expert = tl.load(tiles + 2 * pid)
    if expert < 0:
        return
    rows = tl.load(tiles + 2 * pid + 1) + tl.arange(0, BM)
    live = rows < tl.load(bounds + expert + 1)
    rows = rows.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    wide = expert.to(tl.int64) * N + n
    x_start = x + rows[None, :] * (K + RANK)
    dtype = x.dtype.element_ty
    BLOCKS: tl.constexpr = K // 64
    total = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(0, BLOCKS, UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            block = start + i
            some = inside & (block < BLOCKS)
            at = block * 32 + tl.arange(0, 32)
            packed = tl.load(
                codes + wide[:, None] * (K // 2) + at[None, :], mask=some[:, None], other=0
            )
            scale = tl.load(absmax + wide * BLOCKS + block, mask=some, other=0.0)
            ok = live[None, :] & (block < BLOCKS)
            even = tl.load(x_start + at[:, None], mask=ok, other=0.0)
            odd = tl.load(x_start + (K // 2) + at[:, None], mask=ok, other=0.0)
            high, low = _halves(packed, table, x, ASM)
            part = tl.dot(high, even, input_precision="ieee")
            part = tl.dot(low, odd, part, input_precision="ieee")
            total += part * scale[:, None]
    if RANK > 0:
        j = tl.arange(0, RANK)
        f = tl.load(factor + wide[:, None] * RANK + j[None, :], mask=inside[:, None], other=0.0)
        tail = tl.load(x_start + K + j[:, None], mask=live[None, :], other=0.0)
        total = tl.dot(f, tail, total, input_precision="ieee")
    to = y + rows[:, None] * N + n[None, :]
    tl.store(to, tl.trans(total).to(dtype), mask=live[:, None] & inside[None, :])


def suits(packed: Packed) -> bool:
    """Whether blocks lie within rows: what `launch` needs beside `packed.suits()`."""
    return packed.kind != "int8" and packed.blocksize == 64 and packed.shape[2] % 64 == 0


def launch(
    x: Tensor,
    packed: Packed,
    factor: Tensor | None,
    absmax: Tensor,
    bounds: Tensor,
    tiles: Tensor,
    tile: int,
    config: Config,
) -> Tensor:
    """`(R, N)` = x W^T, and x's last r columns times the factor.

    Args:
        x: `(R, K + r)` sorted rows; of the first K columns the even ones come first.
        packed: `(E, N, K)`.
        factor: `(E, N, r)`, or None for r = 0.
        absmax: fp32 `(E N K / 64,)`: room for what a nested absmax decodes to, or the absmax.
        bounds: `(E + 1,)` int32.
        tiles: As `layer.Routing` has them.
        tile: Rows in a tile.
        config: How to cut it.
    """
    experts, n, k = packed.shape
    if packed.nested is not None:
        blocks = n * k // 64
        table2, absmax2, offset, second = packed.nested
        absmax_kernel[(triton.cdiv(blocks, 1024), experts)](
            packed.absmax, table2, absmax2, offset, bounds, absmax, blocks,
            NESTED=second, BLOCK=1024, enable_fp_fusion=False,
        )  # fmt: skip
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    fused_kernel[(triton.cdiv(n, config.block), tiles.shape[0])](
        x, packed.codes, absmax, packed.table, x if factor is None else factor, tiles, bounds, y,
        N=n, K=k, RANK=0 if factor is None else factor.shape[2],
        ASM=lookup_asm(packed.kind, x.dtype) if x.is_cuda else "",
        BM=tile, BN=config.block, UNROLL=config.unroll, STAGES=config.stages,
        num_warps=config.warps,
    )  # fmt: skip
    return y
