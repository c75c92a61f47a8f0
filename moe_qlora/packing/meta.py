"""Packed weights on the meta device: their tensors have shapes and no values.

A plan of memory works with them, and a model on meta that is to look packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.weights import PackedWeight
from ..layout import ExpertParam
from . import parametrize
from .decoders import bnb, hold
from .format import packed_tensors
from .settings import CodecSettings


def blank_weight(
    shape: tuple[int, ...], dtype: torch.dtype, settings: CodecSettings
) -> PackedWeight:
    """Return what `codec.pack` makes of a weight of this shape and dtype, on meta."""
    blank = {
        end: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for end, spec in packed_tensors(shape, settings).items()
        if spec.shape is not None
    }
    return settings.codec.assemble(blank, shape, dtype, settings)


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
    if not isinstance(module, bnb.Linear8bitLt):
        module.weight = hold(blank)
        return
    module.weight = bnb.Int8Params(blank.codes, requires_grad=False, has_fp16_weights=False)
    module.weight.CB, module.weight.SCB = module.weight.data, blank.absmax
