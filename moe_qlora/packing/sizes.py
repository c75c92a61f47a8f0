"""Bytes that packed expert stacks take; pure arithmetic, free of torch.

A 4-bit stack holds, for n weights in blocks of 64:

    codes            ceil(n / 2)               two codes to a byte
    absmax           4 * ceil(n / 64)          one float32 a block
    code table       4 * 16
    with double quantization the absmax are themselves quantized, in blocks of 256:
    absmax           1 * ceil(n / 64)
    nested absmax    4 * ceil(ceil(n / 64) / 256)
    nested table     4 * 256, and 4 for the offset

that is 0.5625 bytes a weight, or 0.5159 with double quantization. An 8-bit stack holds one byte a
weight and one float32 for each row along the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

KINDS = ("nf4", "fp4", "int8")

_NESTED_BLOCK = 256
_FLOAT = 4


def packed_nbytes(
    shape: Sequence[int], kind: str, *, double_quant: bool = False, blocksize: int = 64
) -> int:
    """Bytes of one packed stack, codes, statistics and code tables together.

    Args:
        shape: Shape of the decoded stack.
        kind: "nf4", "fp4" or "int8".
        double_quant: Whether the 4-bit statistics are quantized as well; no meaning for "int8".
        blocksize: Weights to a first-level block.

    Raises:
        ValueError: `kind` is none of these.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    numel = math.prod(shape)
    if kind == "int8":
        return numel + _FLOAT * (numel // shape[-1])
    blocks = -(-numel // blocksize)
    total = (numel + 1) // 2 + _FLOAT * 16
    if not double_quant:
        return total + _FLOAT * blocks
    nested = -(-blocks // _NESTED_BLOCK)
    return total + blocks + _FLOAT * (nested + 256 + 1)


def load_extra_nbytes(
    shapes: Sequence[Sequence[int]], itemsize: int, kind: str, *, double_quant: bool = False
) -> int:
    """Bytes that packing one module's stacks while loading needs beside their packed form.

    The largest expert's matrix in the dtype of the checkpoint, and with double quantization the
    float32 statistics of all stacks, which are quantized in their turn once a stack is complete.

    Args:
        shapes: Shapes of the decoded stacks, or of a single matrix.
        itemsize: Bytes of one weight as it comes.
        kind: "nf4", "fp4" or "int8".
        double_quant: Whether the 4-bit statistics are quantized as well.
    """
    matrices = (math.prod(shape[1:] if len(shape) > 2 else shape) for shape in shapes)
    extra = itemsize * max(matrices, default=0)
    if kind == "int8" or not double_quant:
        return extra
    return extra + sum(_FLOAT * -(-math.prod(shape) // 64) for shape in shapes)
