"""Which tensors can be packed, and why another one cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import dtype_name
from .format import code_nbytes
from .settings import FLOAT_DTYPES, CodecSettings


def why_not(weight: Tensor, settings: CodecSettings) -> str | None:
    """Return why this tensor cannot be packed, to follow its name in a sentence; None if it can."""
    plain = weight.detach()
    if hasattr(weight, "ds_id") or hasattr(weight, "ds_status"):
        return "is partitioned by DeepSpeed ZeRO-3: pack the model before DeepSpeed takes it over"
    if type(plain) is not Tensor:
        kind = type(plain).__name__
        if hasattr(plain, "device_mesh"):
            return f"is sharded ({kind}): pack the model before it is sharded"
        return f"is a {kind} and no plain tensor: it is packed already by another tool, or traced"
    if plain.is_meta:
        return "is on the meta device and has no values: load the weights first"
    return why_not_packed(plain.shape, plain.dtype, settings)


def why_not_packed(
    shape: Sequence[int], weight_dtype: torch.dtype, settings: CodecSettings
) -> str | None:
    """Return what `why_not` does for a tensor of which only shape and dtype are known."""
    if weight_dtype not in FLOAT_DTYPES:
        dtype = dtype_name(weight_dtype)
        if weight_dtype.is_floating_point and weight_dtype.itemsize > 1:
            return f"is {dtype}: bitsandbytes packs float32, float16 and bfloat16; cast it first"
        return (
            f"is {dtype}, so that it is packed already by another tool or is no weight: "
            "dequantize it to float32, float16 or bfloat16 first"
        )
    numel = math.prod(shape)
    if len(shape) < 2 or numel == 0:
        return f"has the shape {tuple(shape)}: a weight has two or more dimensions and no empty one"
    if settings.kind != "int8" and code_nbytes(numel) % settings.storage_dtype.itemsize:
        return (
            f"has {numel} weights, whose {code_nbytes(numel)} bytes of codes do not fill whole "
            f"{dtype_name(settings.storage_dtype)} numbers: set bnb_4bit_quant_storage=torch.uint8"
        )
    return None
