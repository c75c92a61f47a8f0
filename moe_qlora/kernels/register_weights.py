"""Weights in registers as the left operand of a product: what two kernels in Gluon share.

A thread holds, of two features, one group of 64 columns in four, which is one block or a part of
one. The matrix unit's left operand lies the same way for wgmma (`quantized_mm_registers.py`) and
for mma.sync (`quantized_mm_few.py`): of each 16 columns four in each of four threads. So both look
weights up where they are multiplied, and take columns in the same order.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .limits import supports_registers
from .quantized_mm_hopper import look_up
from .weights import WeightSpec

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


def supports(spec: WeightSpec, dtype: torch.dtype) -> bool:
    """Whether the kernels take what `quantized_mm.supports`: sums over columns of 16-bit rows."""
    halves = dtype in (torch.bfloat16, torch.float16)
    return halves and supports_registers(spec.kind, spec.blocksize, spec.shape[2])
