"""Decoding of one quantized tensor, or rows of it, in pieces.

All formats are the same product: codes (L, R, C) as fp32 values, times a grid of scales of which
each belongs to a block of rows and columns. They differ in how a code becomes a value, in the block
and in the dtype of the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.limits import cdiv

PIECE = 1 << 20
"""Most values that are in fp32 at a time on the CPU, in whose cache they stay; on other devices it
is four times as many, which start fewer kernels."""

CODES, SCALE, FACTOR, DIVISOR, SHAPE = "codes", "scale", "factor", "divisor", "shape"
"""Roles of stored tensors: scales of scales are multiplied (factor) or divided by (divisor)."""


@dataclass(frozen=True)
class Quantized:
    """How one plain tensor is stored.

    Attributes:
        parts: Keys on disk by their role; `CODES` is the one that the tensor is known by.
        shape: Of the plain tensor: (rows, columns) or (experts, rows, columns).
        block: Rows and columns that share a scale; of the matrix of codes, whatever the plain one.
        unpack: Codes (r, whatever their width) -> fp32 values (r, at least the columns).
        one_scale: Whether a single scale belongs to all of the tensor.
        transposed: Whether the plain tensor has the codes' rows as its last dimension.
    """

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    block: tuple[int, int]
    unpack: Callable[[Tensor], Tensor]
    one_scale: bool = False
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the first dimension counts experts."""
        return len(self.shape) == 3

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a matrix of codes, once unpacked."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix; edges may be cut off a block."""
        rows, columns = self.matrix
        return cdiv(rows, self.block[0]), cdiv(columns, self.block[1])

    def rows(self, role: str, start: int, stop: int) -> tuple[int, int] | None:
        """Return the rows of a part that rows [start, stop) need; None: all, which is one value."""
        if role == CODES or (role == SCALE and self.stacked and not self.one_scale):
            return start, stop
        if role == SCALE and not self.one_scale:
            return start // self.block[0], cdiv(stop, self.block[0])
        return None


def exponents(scale: Tensor) -> Tensor:
    """Return scales as fp32; bytes are exponents: 2^(byte - 127), 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification v1.0, E8M0.
    """
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def dequantize(
    tensor: Quantized, parts: Mapping[str, Tensor], start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Decode rows [start, stop) of the first dimension from those rows of the parts.

    Every value is made in fp32 and rounded once; a piece of them is in fp32 at a time.
    """
    if start == stop:
        return torch.empty((0, *tensor.shape[1:]), dtype=dtype, device=parts[CODES].device)
    height, columns = tensor.matrix
    experts, rows, first = (stop - start, height, 0) if tensor.stacked else (1, stop - start, start)
    codes = parts[CODES].reshape(experts, rows, -1)
    scale = parts[SCALE].reshape(1 if tensor.one_scale else experts, -1, tensor.grid[1])
    shape = (experts, columns, rows) if tensor.transposed else (experts, rows, columns)
    plain = torch.empty(shape, dtype=dtype, device=codes.device)
    target = plain.transpose(1, 2) if tensor.transposed else plain
    step = max(1, PIECE * (1 if codes.is_cpu else 4) // columns)
    for expert in range(experts):
        own = scale[0 if tensor.one_scale else expert]
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            values = tensor.unpack(codes[expert, begin:end])[:, :columns]
            place = first % tensor.block[0] + begin
            _multiply(values, _piece(tensor, own, parts, place, end - begin), tensor.block[1])
            target[expert, begin:end] = values.to(dtype)  # the one rounding
    return plain if tensor.stacked else plain[0]


def _piece(
    tensor: Quantized, scale: Tensor, parts: Mapping[str, Tensor], place: int, rows: int
) -> Tensor:
    """Return the scales (rows, grid columns) of rows from `place` on, fp32."""
    high = tensor.block[0]
    top, bottom = place // high, cdiv(place + rows, high)
    grid = exponents(scale[top:bottom])
    if DIVISOR in parts:
        grid = grid / parts[DIVISOR].float()
    if FACTOR in parts:
        grid = grid * parts[FACTOR].float()
    if high == 1:
        return grid
    index = torch.arange(place, place + rows, device=grid.device) // high - top
    return grid.index_select(0, index)


def _multiply(values: Tensor, scale: Tensor, wide: int) -> None:
    """Multiply values (r, C) by scales (r, ceil(C / wide)) in place."""
    columns = values.shape[1]
    whole = columns // wide
    if whole:
        blocks = values[:, : whole * wide].unflatten(1, (whole, wide))
        blocks *= scale[:, :whole, None]
    if whole < scale.shape[1]:
        values[:, whole * wide :] *= scale[:, whole:]
