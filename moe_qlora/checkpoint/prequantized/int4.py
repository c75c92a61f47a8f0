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
from ..reader import TensorInfo
from .config import Scheme
from .decode import CODES, SCALE, SHAPE, Quantized
from .fp8 import find_block
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
    shape: tuple[int, ...],
) -> Quantized:
    """Return how words of codes and their scales make a plain tensor of `shape`."""
    words, scale = stored[key], f"{name}_scale"
    per = 32 // scheme.bits
    if words.dtype != torch.int32 or words.shape != (*shape[:-1], -(-shape[-1] // per)):
        raise CheckpointError(
            f"{key} is {words.dtype} of shape {words.shape}, which does not hold {scheme.bits} "
            f"bits for each of {shape} as {name}_shape has it: copy both files again."
        )
    block, one = find_block(key, shape, scale, stored[scale], scheme)
    parts = {CODES: key, SCALE: scale, SHAPE: f"{name}_shape"}
    return Quantized(parts, shape, block, _UNPACK[scheme.bits], one_scale=one)
