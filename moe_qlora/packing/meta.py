"""Packed weights on the meta device: their tensors have shapes and no values.

A plan of memory works with them, and a model on meta that is to look packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.weights import NestedAbsmax, PackedWeight
from ..layout import ExpertParam
from . import parametrize
from .codec import microscaled
from .decoders import bnb, hold
from .format import (
    ABSMAX,
    CODES,
    EXPONENTS,
    NESTED_ABSMAX,
    NESTED_BLOCK,
    NESTED_TABLE,
    SCALES,
    TABLE,
    packed_tensors,
)
from .settings import CodecSettings


def blank_weight(
    shape: tuple[int, ...], dtype: torch.dtype, settings: CodecSettings
) -> PackedWeight:
    """Return what `codec.pack` makes of a weight of this shape and dtype, on meta."""
    size = torch.Size(shape)
    blank = {
        end: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for end, spec in packed_tensors(shape, settings).items()
        if spec.shape is not None
    }
    codes = blank[CODES]
    if settings.kind == "int8":
        return PackedWeight(codes, blank[SCALES], None, 0, None, size, "int8", dtype)
    if settings.kind == "mxfp4":
        return microscaled(codes, blank[EXPONENTS], size, dtype, settings)
    nested = None
    if settings.double_quant:
        offset = torch.empty((), dtype=torch.float32, device="meta")
        nested = NestedAbsmax(blank[NESTED_TABLE], blank[NESTED_ABSMAX], offset, NESTED_BLOCK)
    return PackedWeight(
        codes, blank[ABSMAX], blank[TABLE], settings.blocksize, nested, size, settings.kind, dtype,
        settings.compute_dtype,
    )  # fmt: skip


def pack_blank(model: nn.Module, param: ExpertParam, settings: CodecSettings) -> None:
    """Attach a blank packed weight for one expert weight of a model, under each of its names."""
    weight = model.get_parameter(param.name)
    blank = blank_weight(tuple(weight.shape), weight.dtype, settings)
    for name in param.names:
        module, leaf = parametrize.owner_of(model, name)
        if not parametrize.is_packed(module, leaf):
            parametrize.attach(module, leaf, blank)


def pack_blank_linear(module: Any, dtype: torch.dtype, settings: CodecSettings) -> None:
    """Give one of bitsandbytes' Linear layers on meta a blank packed weight, decoded to `dtype`."""
    blank = blank_weight((module.out_features, module.in_features), dtype, settings)
    if settings.kind != "int8":
        module.weight = hold(blank)
        return
    module.weight = bnb.Int8Params(blank.codes, requires_grad=False, has_fp16_weights=False)
    module.weight.CB, module.weight.SCB = module.weight.data, blank.absmax
