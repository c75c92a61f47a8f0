"""Bytes of packed weights, in memory and while they are packed: arithmetic on shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .format import ABSMAX, packed_tensors
from .settings import CodecSettings

_FLOAT = torch.float32.itemsize


def packed_nbytes(shape: Sequence[int], settings: CodecSettings) -> int:
    """Return the bytes of a packed weight in memory: codes, statistics and code tables together."""
    offset = _FLOAT if settings.double_quant else 0
    return offset + sum(spec.nbytes for spec in packed_tensors(shape, settings).values())


def load_extra_nbytes(
    shapes: Sequence[Sequence[int]], itemsize: int, settings: CodecSettings
) -> int:
    """Return the bytes that packing one module's weights while loading needs beside their codes.

    They are the largest expert's matrix in the checkpoint's dtype, and with double quantization the
    float32 absmax of all weights, which are packed themselves only once a weight is complete.
    `itemsize` is that of the checkpoint's dtype.
    """
    matrices = (math.prod(shape[1:] if len(shape) > 2 else shape) for shape in shapes)
    extra = itemsize * max(matrices, default=0)
    if not settings.double_quant:
        return extra
    return extra + sum(
        _FLOAT * (packed_tensors(shape, settings)[ABSMAX].numel or 0) for shape in shapes
    )
