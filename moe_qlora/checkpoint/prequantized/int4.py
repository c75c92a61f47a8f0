"""Integers that compressed-tensors packs: symmetric, 4 or 8 bits, in words of 32.

    X_packed (R, ceil(C bits / 32)) int32 + X_scale (R, C / group) + X_shape (R, C)

The first code of a word is in its lowest bits; codes are stored with 2^(bits - 1) added. Words of a
row are its own: columns that a last word has room for are no part of the tensor.
Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized/helpers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.limits import cdiv
from ..reader import TensorInfo
from .config import Scheme
from .decode import CODES, SCALE, SHAPE, Quantized
from .fp8 import FLOAT_SCALES, check_dims, described, find_block
from .nibbles import unpack_nibbles

INT4 = tuple(float(code - 8) for code in range(16))


def unpack_int4(words: Tensor) -> Tensor:
    """Return the fp32 values (r, 8 w) of words (r, w); words are little-endian."""
    return unpack_nibbles(words, INT4)


def unpack_int8(words: Tensor) -> Tensor:
    """Return the fp32 values (r, 4 w) of words (r, w)."""
    return words.contiguous().view(torch.uint8).float() - 128


_UNPACK: dict[int, Callable[[Tensor], Tensor]] = {4: unpack_int4, 8: unpack_int8}


def plan_int(
    key: str,
    name: str,
    stored: Mapping[str, TensorInfo],
    scheme: Scheme,
    shape_of: Callable[[str], tuple[int, ...]],
) -> Quantized:
    """Return how words of codes and their scales make a plain tensor.

    Its columns are those of all groups, which spares reading thousands of shapes from disk; they
    are read (`shape_of`) where there are no groups. `check_shape` compares them when a tensor is
    read.
    """
    words, scale, said = stored[key], f"{name}_scale", f"{name}_shape"
    check_dims(key, words.shape)
    group, per = scheme.blocks[0][1], 32 // scheme.bits
    if group is None:
        shape = shape_of(said)
    else:
        columns = stored[scale].shape[-1] * group if stored[scale].shape else 0
        shape = (*words.shape[:-1], columns)
    wanted = (*shape[:-1], cdiv(shape[-1], per)) if shape else ()
    if words.dtype != torch.int32 or words.shape != wanted:
        source = f"{said} has" if group is None else f"{scale} and groups of {group} have"
        raise CheckpointError(
            f"{key} is {described(words)}, and {scheme.bits} bits for each of {shape}, as {source} "
            f"it, take int32 of shape {wanted}: copy the files again."
        )
    block, one = find_block(key, shape, scale, stored[scale], scheme, FLOAT_SCALES)
    parts = {CODES: key, SCALE: scale, SHAPE: said}
    return Quantized(parts, shape, block, _UNPACK[scheme.bits], one_scale=one)


def check_shape(tensor: Quantized, shape: tuple[int, ...]) -> None:
    """Refuse a stored shape that the codes do not have."""
    if shape != tensor.shape:
        raise CheckpointError(
            f"{tensor.parts[SHAPE]} says {shape}, and {tensor.parts[CODES]} and its scales are of "
            f"{tensor.shape}: copy the files again."
        )
