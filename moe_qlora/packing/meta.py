"""moe_qlora/packing/meta.py: to be described."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import nn

from ..layout import ExpertParam
from . import parametrize
from .codec import Int8State, PackedWeight
from .settings import CodecSettings


def blank_weight(
    shape: tuple[int, ...], dtype: torch.dtype, settings: CodecSettings
) -> PackedWeight:
    """What `codec.pack` makes of a weight of this shape, on meta."""
    numel, size = 1, torch.Size(shape)
    for length in shape:
        numel *= length
    if settings.kind == "int8":
        scales = torch.empty(numel // shape[-1], dtype=torch.float32, device="meta")
        codes = torch.empty(shape, dtype=torch.int8, device="meta")
        return PackedWeight(codes, Int8State(scales, size, dtype), "int8", size, dtype)
    blocks = -(-numel // settings.blocksize)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
    state = QuantState(
        absmax=torch.empty(blocks, **wide),
        shape=size,
        code=torch.empty(16, **wide),
        blocksize=settings.blocksize,
        quant_type=settings.kind,
        dtype=dtype,
    )
    if settings.double_quant:
        state.absmax = torch.empty(blocks, dtype=torch.uint8, device="meta")
        state.offset = torch.empty((), **wide)
        state.state2 = QuantState(
            absmax=torch.empty(-(-blocks // 256), **wide),
            code=torch.empty(256, **wide),
            blocksize=256,
            dtype=torch.float32,
        )
        state.nested = True
    stored = settings.storage_dtype
    codes = torch.empty((-(-((numel + 1) // 2) // stored.itemsize), 1), dtype=stored, device="meta")
    return PackedWeight(codes, state, settings.kind, size, dtype, settings.compute_dtype)


def blank_like(stack: PackedWeight) -> nn.Parameter:
    """Return the parameter of a packed weight like this one, on meta."""
    state = stack.state
    settings = CodecSettings(
        stack.kind, state.nested, stack.codes.dtype, stack.compute_dtype, state.blocksize
    )
    return parametrize.hold(blank_weight(tuple(stack.shape), stack.dtype, settings))


def pack_blank(model: nn.Module, param: ExpertParam, settings: CodecSettings) -> None:
    """Attach a blank packed weight for one expert weight of a model, under each of its names."""
    weight = model.get_parameter(param.name)
    stack = blank_weight(tuple(weight.shape), weight.dtype, settings)
    for name in param.names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if not parametrize.is_packed(module, leaf):
            parametrize.attach(module, leaf, stack)
