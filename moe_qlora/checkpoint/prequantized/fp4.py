"""Codes of 4 bits that are floats (E2M1), two in a byte, the first in the low half.

    mxfp4 (gpt-oss)       N_blocks (E, R, G, 16) + N_scales (E, R, G), exponents -> N (E, 32 G, R)
    nvfp4 (compressed)    X_packed (R, C/2) + X_scale fp8 (R, C/16) / X_global_scale
    mxfp4 (compressed)    X_packed (R, C/2) + X_scale, exponents (R, C/32)
    nvfp4 (modelopt)      X uint8 (R, C/2) + X_scale fp8 (R, C/16) * X_scale_2
    fp4 (DeepSeek-V4)     X int8 (R, C/2) + M.scale e8m0 (R, C/32)

Sources: OCP Microscaling Formats (MX) Specification v1.0 (E2M1),
https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/weights.py,
https://github.com/vllm-project/compressed-tensors, compressors/nvfp4 and compressors/mxfp4,
https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.weights import MX_BLOCK, TABLES
from ..reader import TensorInfo
from .config import MXFP4, Scheme
from .decode import CODES, DIVISOR, FACTOR, SCALE, Quantized
from .fp8 import FLOAT_SCALES, check_dims, described, find_block
from .nibbles import unpack_nibbles

MXFP4_SCALES = (torch.uint8, torch.float8_e8m0fnu)
NVFP4_SCALES = (torch.float8_e4m3fn,)


def unpack_e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values (r, 2 w) of bytes (r, w)."""
    return unpack_nibbles(codes, TABLES[MXFP4])


def plan_mxfp4(name: str, stored: Mapping[str, TensorInfo]) -> Quantized:
    """Return how `name`_blocks and `name`_scales of gpt-oss make the plain (E, in, out)."""
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    is_blocks = len(blocks.shape) == 4 and blocks.shape[3] == MX_BLOCK // 2
    if not is_blocks or blocks.dtype != torch.uint8 or 0 in blocks.shape:
        raise CheckpointError(
            f"{name}_blocks is {described(blocks)}: MXFP4 codes are bytes of shape (experts, "
            "rows, groups, 16); copy the file again."
        )
    experts, rows, groups = blocks.shape[:3]
    if scales.shape != blocks.shape[:3] or scales.dtype not in MXFP4_SCALES:
        raise CheckpointError(
            f"{name}_scales is {described(scales)}: wanted are bytes of shape "
            f"{blocks.shape[:3]}, one for each group of {name}_blocks; copy both files again."
        )
    parts = {CODES: f"{name}_blocks", SCALE: f"{name}_scales"}
    shape = (experts, groups * MX_BLOCK, rows)
    return Quantized(parts, shape, (1, MX_BLOCK), unpack_e2m1, transposed=True)


def plan_fp4(
    key: str, name: str, scale: str, stored: Mapping[str, TensorInfo], scheme: Scheme
) -> Quantized:
    """Return how bytes of codes and their scales make a plain tensor twice as wide.

    Args:
        key: Of the codes.
        name: That keys of scales begin with.
        scale: Key of the scales.
        stored: What lies on disk.
        scheme: Of the codes; where it is nested, the scales have a scale.
    """
    codes = stored[key]
    check_dims(key, codes.shape)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    dtypes = NVFP4_SCALES if scheme.nested else MXFP4_SCALES
    block, one = find_block(key, shape, scale, stored[scale], scheme, dtypes)
    parts = {CODES: key, SCALE: scale}
    if scheme.nested:
        role, other = (
            (FACTOR, f"{name}_scale_2") if key == name else (DIVISOR, f"{name}_global_scale")
        )
        if other not in stored:
            raise CheckpointError(
                f"{other} is missing, without which {key} cannot be read: copy the whole folder."
            )
        if prod(stored[other].shape) != 1 or stored[other].dtype not in FLOAT_SCALES:
            raise CheckpointError(
                f"{other} is {described(stored[other])}, and one floating-point value belongs to "
                f"{key}: copy both files again."
            )
        parts[role] = other
    return Quantized(parts, shape, block, unpack_e2m1, one_scale=one)
