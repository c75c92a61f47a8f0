"""Packed weights in state dicts: bitsandbytes' keys, and those of the shardable layout.

    layout      keys of a weight <module>.<name>                            a Linear4bit's weight
    compact     <module>.<name>, and the ends in settings.py                the same
    shardable   <module>.parametrizations.<name>.original                   <module>.weight
                <module>.parametrizations.<name>.0.absmax, .nested          <module>.statistics.*
                (int8 and users' codecs: .0.scale_bits)

Each can be loaded into the other. Files of a packed folder always have the compact layout's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.weights import PackedWeight
from .bnb4bit import NESTED_ABSMAX, RECORD
from .codec import restore
from .codecs import CODES, codec_of, kinds
from .decoders import (
    PackedScales,
    Params4bit,
    ShardableStatistics,
    as_bits,
    bnb,
    from_quant_state,
    hold,
)
from .settings import STORAGE_DTYPES, CodecSettings


def pop_packed(
    state_dict: dict[str, Any],
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    settings: CodecSettings,
    errors: list[str],
) -> PackedWeight | None:
    """Remove a packed weight from a state dict, copying statistics; on a fault None and an error.

    Codes in another storage dtype of the same size are the same bytes.
    """
    codes, storage = state_dict.pop(key), settings.storage_dtype
    codes = codes.contiguous()
    if codes.dtype != storage and codes.dtype.itemsize == storage.itemsize:
        codes = codes.view(storage) if codes.dtype in STORAGE_DTYPES else codes
    keys = [other for other in state_dict if other.startswith(f"{key}.")]
    tensors = {other.removeprefix(key): state_dict.pop(other).clone() for other in keys}
    settings = replace(settings, double_quant=NESTED_ABSMAX in tensors)
    try:
        return restore({CODES: codes, **tensors}, shape, dtype, settings)
    except ValueError as error:
        errors.append(
            f"{key} {error}: load codes that were packed with the same settings, or 16-bit weights "
            "into an unpacked model."
        )
        return None


def shardable_entries(packed: PackedWeight) -> dict[str, Tensor]:
    """Return the parameters of a whole weight in the shardable layout, by the end of their key."""
    if not codec_of(packed.kind).in_quant_state:
        codes = packed.codes.detach().reshape(-1, 1)
        return {"original": codes, "0.scale_bits": as_bits(packed.absmax)}
    statistics = ShardableStatistics(packed)
    codes = packed.codes.detach().view(-1).view(torch.uint8).unsqueeze(1)
    entries = {f"0.{name}": value.data for name, value in statistics.named_parameters()}
    return {"original": codes, **entries}


def is_shardable_entry(state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Whether a state dict has a packed weight in the shardable layout."""
    return any(f"{prefix}0.{name}" in state_dict for name in ("absmax", "scale_bits"))


def pop_shardable(state_dict: dict[str, Any], prefix: str, like: PackedWeight) -> PackedWeight:
    """Remove a packed weight from a state dict in the shardable layout.

    `like` is the weight that it replaces; shape and settings must be equal.
    """
    codes = state_dict.pop(prefix + "original")
    codec = codec_of(like.kind)
    if not codec.in_quant_state:
        scales = state_dict.pop(prefix + "0.scale_bits").clone().view(codec.scale_dtype)
        codes = codes.view(codec.codes_shape(like.shape))
        return replace(like, codes=codes, absmax=scales, owner=None)
    statistics = ShardableStatistics(like)
    for name, parameter in statistics.named_parameters():
        parameter.data = state_dict.pop(f"{prefix}0.{name}").clone()
    return statistics.packed(codes)


def put_shardable(
    state_dict: dict[str, Any],
    prefix: str,
    parameters: Mapping[str, Tensor],
    loaded: PackedWeight | None,
) -> None:
    """Put a packed weight into a state dict under the keys of the shardable layout.

    `parameters` are the module's own by the end of their key: they are written where nothing could
    be loaded, and where they are sharded, this rank's shard is written.
    """
    entries = dict(parameters) if loaded is None else shardable_entries(loaded)
    for end, entry in entries.items():
        own = parameters.get(end)
        sharded = hasattr(own, "device_mesh") and not hasattr(entry, "device_mesh")
        state_dict[prefix + end] = _share_of(entry, own) if sharded else entry


def _share_of(whole: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    device = like.to_local().device
    moved = whole if device.type == "meta" else whole.to(device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def load_linears(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, assign: bool, errors: list[str]
) -> None:
    """Load bitsandbytes' Linear layers from either layout's keys, which torch does not know.

    torch would cast codes that are stored in another dtype, which destroys them.
    """
    for name, module in model.named_modules():
        if isinstance(module, bnb.Linear4bit):
            _load_4bit(module, state_dict, f"{prefix}{name}.", assign, errors)
        elif isinstance(module, bnb.Linear8bitLt):
            _load_8bit(module, state_dict, f"{prefix}{name}.")


def _load_4bit(
    module: Any, state_dict: dict[str, Any], prefix: str, assign: bool, errors: list[str]
) -> None:
    weight, statistics = module._parameters.get("weight"), module._modules.get("statistics")
    key, own = f"{prefix}weight", f"{prefix}statistics."
    if any(f"{key}{RECORD}{kind}" in state_dict for kind in kinds()):
        if isinstance(statistics, ShardableStatistics):
            form = statistics.kind, statistics.storage_dtype, statistics.blocksize
        elif isinstance(weight, Params4bit):
            form = weight.quant_type, weight.quant_storage, weight.blocksize
        else:
            return
        kind, storage, blocksize = form
        shape = int(module.out_features), int(module.in_features)
        settings = CodecSettings(kind, False, storage, None, blocksize)
        loaded = pop_packed(state_dict, key, shape, None, settings, errors)
    elif statistics is None and f"{own}absmax" in state_dict and isinstance(weight, Params4bit):
        entries = {"original": state_dict.pop(key)}
        parts = [part for part in ("absmax", "nested") if f"{own}{part}" in state_dict]
        entries |= {f"0.{part}": state_dict.pop(f"{own}{part}") for part in parts}
        like = from_quant_state(weight.data, cast(Any, weight).quant_state)
        loaded = pop_shardable(entries, "", like)
    else:
        return
    if isinstance(statistics, ShardableStatistics):
        parameters: dict[str, Tensor] = {"original": weight}
        parameters |= {f"0.{part}": value for part, value in statistics.named_parameters()}
        entries = {}
        put_shardable(entries, "", parameters, loaded)
        state_dict[key] = entries.pop("original")
        state_dict |= {own + end.removeprefix("0."): entry for end, entry in entries.items()}
        return
    state_dict[key] = weight if loaded is None else loaded.codes
    if loaded is None or (weight.is_meta and not assign):
        return  # torch's own message names meta
    if not assign:
        loaded = loaded.map(partial(torch.Tensor.to, device=weight.device, copy=True))
    codes: Any = hold(loaded)
    state_dict[key] = codes
    codes.module, module.weight, module.quant_state = module, codes, codes.quant_state


def _load_8bit(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    scales, bits = f"{prefix}SCB", f"{prefix}statistics.scale_bits"
    statistics = module._modules.get("statistics")
    if isinstance(statistics, PackedScales) and scales in state_dict:
        state_dict.pop(f"{prefix}weight_format", None)
        entry = state_dict.pop(scales).view(torch.int32)
        own: Any = statistics.scale_bits
        state_dict[bits] = _share_of(entry, own) if hasattr(own, "device_mesh") else entry
        weight: Any = module.weight
        if hasattr(weight, "device_mesh"):
            state_dict[f"{prefix}weight"] = _share_of(state_dict[f"{prefix}weight"], weight)
    elif statistics is None and bits in state_dict:
        state_dict[scales] = state_dict.pop(bits).view(torch.float32)
        state_dict[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)
