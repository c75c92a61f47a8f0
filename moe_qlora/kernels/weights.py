"""What the kernels are handed: a packed stack as plain tensors and numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from .limits import LINE, TILE, WIDE_TILE

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


class WeightSpec(NamedTuple):
    """What the kernels' choice depends on of a packed stack: fields of `Packed`.

    Attributes:
        shape: `(E, rows, cols)`.
        kind: "nf4", "fp4" or "int8".
        blocksize: Weights in a block.
        nested: Block size of the second level, 0 without one.
        device: Index of the CUDA device, -1 for the CPU.
    """

    shape: tuple[int, int, int]
    kind: str
    blocksize: int
    nested: int
    device: int


class Packed(NamedTuple):
    """A packed stack `(E, rows, cols)`, every part contiguous and on one device.

    Attributes:
        codes: 4-bit: uint8, two codes a byte, the first in the high half; int8: the codes.
        absmax: 4-bit: fp32 or, with double quantization, uint8, one a block; int8: fp32, one a row.
        table: `(16,)` fp32 values of the 4-bit codes; None for int8.
        blocksize: Weights in a block, a power of two; of int8 unused.
        nested: Table `(256,)` fp32, absmax fp32, offset `()` fp32 and block size of the second
            level; None without double quantization.
        shape: `(E, rows, cols)`.
        kind: "nf4", "fp4" or "int8".
    """

    codes: Tensor
    absmax: Tensor
    table: Tensor | None
    blocksize: int
    nested: tuple[Tensor, Tensor, Tensor, int] | None
    shape: tuple[int, int, int]
    kind: str

    @property
    def experts(self) -> int:
        """E."""
        return self.shape[0]

    @property
    def form(self) -> WeightSpec:
        """What the kernels' choice depends on."""
        nested = 0 if self.nested is None else self.nested[3]
        return WeightSpec(self.shape, self.kind, self.blocksize, nested, self.codes.get_device())

    @property
    def matrix(self) -> int:
        """Weights of one expert."""
        return self.shape[1] * self.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and statistics."""
        inner = sum(t.nbytes for t in self.nested[:3]) if self.nested is not None else 0
        return self.codes.nbytes + self.absmax.nbytes + inner

    def aligned(self) -> Packed:
        """The stack, or a copy of which every part starts at a multiple of 16 bytes."""
        parts = (self.codes, self.absmax, self.table, *(self.nested or ())[:3])
        if all(t is None or t.data_ptr() % 16 == 0 for t in parts):
            return self
        nested = self.nested
        if nested is not None:
            nested = nested[0].clone(), nested[1].clone(), nested[2].clone(), nested[3]
        table = None if self.table is None else self.table.clone()
        return Packed(
            self.codes.clone(), self.absmax.clone(), table, self.blocksize, nested, self.shape,
            self.kind,
        )  # fmt: skip

    def suits(self) -> bool:
        """Whether the kernels decode it: whole groups of 8 weights in each row and block."""
        block = self.blocksize
        return (
            self.shape[2] % 8 == 0
            and (self.kind == "int8" or (block >= 8 and block & (block - 1) == 0))
            and self.codes.data_ptr() % 8 == 0
            and (self.nested is None or self.nested[3] & (self.nested[3] - 1) == 0)
            and math.prod(self.shape) > 0
        )


def tile_rows(count: int, experts: int) -> int:
    """Rows in a tile: few where experts have few, and room for most experts' rows in one.

    Args:
        count: R, rows of all experts.
        experts: E.
    """
    return next((t for t in (16, 32) if 2 * t * experts >= 3 * count), TILE)


def tile_counts(count: int, experts: int, tile: int) -> tuple[int, int]:
    """The most tiles there can be, and of `WIDE_TILE` rows, none of these where tiles are small."""
    most = min(experts, count)
    return count // tile + most, count // WIDE_TILE + most if tile == TILE else 0


def row_stride(width: int, itemsize: int, *, few: bool = False) -> int:
    """Elements from row to row: whole lines, where rows are few or that takes up to 1.3 % more.

    Torch's grouped product of Mixtral-8x7B's shape is 0.8 % faster so, LoRA's 16 columns beside
    4,096 and 14,336; of Qwen3-30B-A3B's, beside 2,048 and 768, not at all (H200). Products on codes
    copy 128 bytes of a row at a time.

    Args:
        width: Elements of a row.
        itemsize: Bytes of an element.
        few: Whether the product runs on codes.
    """
    line = LINE // itemsize
    whole = -(-width // line) * line
    return whole if few or 80 * (whole - width) <= width else width
