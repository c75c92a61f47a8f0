"""Codes of 8 bits: FP8 (e4m3, e5m2) and INT8, with a scale a block, channel, tensor or group.

    X (R, C) or (E, R, C), and X_scale_inv | X_scale | M.scale | M.qscale_weight for X = M.weight

The scale multiplies, "inv" or not. Blocks at the edges may be cut off: 576 x 7168 codes in blocks
of 128 x 128 have 5 x 56 scales. Scales are fp32, bf16, fp16, or exponents (e8m0, or bytes).
Sources: https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (weight_dequant),
https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md,
https://github.com/vllm-project/compressed-tensors, compressors/naive_quantized, compressors/mxfp8,
https://docs.vllm.ai/en/latest/features/quantization/modelopt.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.limits import cdiv
from ...layout import dtype_name
from ..reader import TensorInfo
from .config import Block, Scheme
from .decode import CODES, SCALE, Quantized

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
FP8_SCALES = (*FLOAT_SCALES, torch.float8_e8m0fnu, torch.uint8)


def plan_fp8(key: str, scale: str, stored: Mapping[str, TensorInfo], scheme: Scheme) -> Quantized:
    """Return how codes of 8 bits and their scales make a plain tensor of the codes' shape."""
    shape = stored[key].shape
    check_dims(key, shape)
    block, one = find_block(key, shape, scale, stored[scale], scheme, FP8_SCALES)
    return Quantized({CODES: key, SCALE: scale}, shape, block, unpack_bytes, one_scale=one)


def unpack_bytes(codes: Tensor) -> Tensor:
    """Return the fp32 values (r, c) of FP8 or INT8 codes (r, c).

    The CPU converts FP8 one by one, four times slower than a table does. The table is of bfloat16,
    which holds every FP8 value.
    """
    if not codes.is_cpu or codes.dtype == torch.int8:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(torch.bfloat16)
    index = codes.contiguous().view(torch.uint8).int().flatten()
    values = table.view(torch.int16).index_select(0, index).view(torch.bfloat16)
    return values.float().view(codes.shape)


def described(info: TensorInfo) -> str:
    """Return what a stored tensor is, for messages."""
    return f"{dtype_name(info.dtype)} of shape {info.shape}"


def check_dims(key: str, shape: tuple[int, ...]) -> None:
    """Refuse what is no matrix and no stack of them."""
    if len(shape) not in (2, 3) or 0 in shape:
        raise CheckpointError(
            f"{key} has codes of shape {shape}: quantized weights are (out, in) or "
            "(experts, out, in); copy the file again."
        )


def find_block(
    key: str,
    shape: tuple[int, ...],
    scale: str,
    info: TensorInfo,
    scheme: Scheme,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[tuple[int, int], bool]:
    """Return the block that a grid of scales belongs to, and whether one scale is for all.

    Args:
        key: Of the codes.
        shape: Of the matrix of codes once unpacked, or of the stack.
        scale: Key of the scales.
        info: Of the scales.
        scheme: Of which one of the blocks must fit.
        dtypes: That scales of such codes are stored in.

    Raises:
        CheckpointError: The grid does not belong to any of the scheme's blocks, or the dtype does
            not.
    """
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{scale} is {described(info)}, and scales of {key} are "
            f"{' or '.join(map(dtype_name, dtypes))} by {scheme.setting} of quantization_config: "
            "copy both files again, or put the maker's config.json back."
        )
    rows, columns = shape[-2:]
    stack = shape[:-2]
    # modelopt keeps dimensions of 1 between; a scale of a tensor may have none
    grid = tuple(size for size in info.shape if size != 1)
    for block in scheme.blocks:
        high, wide = _sizes(block, rows, columns)
        wanted = (*stack, cdiv(rows, high), cdiv(columns, wide))
        if grid == tuple(size for size in wanted if size != 1) and _first_fits(info, wanted):
            return (high, wide), prod(wanted) == 1
        if block == (None, None) and not grid:
            return (high, wide), True
    fitting = " or ".join(_described(block, stack, rows, columns) for block in scheme.blocks)
    raise CheckpointError(
        f"{scale} has shape {info.shape}, which does not belong to {key} of shape {shape} and "
        f"{scheme.setting} of quantization_config: wanted are scales of shape {fitting}; copy both "
        "files again."
    )


def _first_fits(info: TensorInfo, wanted: tuple[int, ...]) -> bool:
    """Whether the scales' first dimension is the first one of the grid, by which rows are read."""
    return prod(wanted) == 1 or info.shape[0] == wanted[0]


def _sizes(block: Block, rows: int, columns: int) -> tuple[int, int]:
    return block[0] or rows, block[1] or columns


def _described(block: Block, stack: tuple[int, ...], rows: int, columns: int) -> str:
    high, wide = _sizes(block, rows, columns)
    return str((*stack, cdiv(rows, high), cdiv(columns, wide)))
