"""Random experts in MXFP4, as gpt-oss's are kept by `enabled(keep_codes=True)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BLOCK = 32
SCALES = 119, 122
"""Exponents' bytes, from and below: weights then have a standard deviation of about 0.02."""


def random_mxfp4(shape: Sequence[int], transposed: bool, device: torch.device) -> Any:
    """A packed weight of random codes that decodes to `shape` in bf16; None if rows do not fit.

    Args:
        shape: Of the parameter.
        transposed: Whether that is `(E, in, out)`: codes run along `in`, whatever it is.
        device: Where the weight is to be.
    """
    from moe_qlora.packing.mxfp4 import MXFP4
    from moe_qlora.packing.settings import CodecSettings

    numel = torch.Size(shape).numel()
    if shape[1 if transposed else 2] % BLOCK:
        return None
    codes = torch.randint(256, (numel // 2,), device=device, dtype=torch.uint8)
    exponents = torch.randint(*SCALES, (numel // BLOCK,), device=device, dtype=torch.uint8)
    settings = CodecSettings("mxfp4", stored_transposed=transposed)
    return MXFP4.finish(codes, exponents, shape, torch.bfloat16, settings)
