"""The layers whose experts can be moved to host memory, and the device that computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..layout import unwrapped_name
from ..packing.decoders import is_share
from ..packing.packed_list import PackedList
from ..packing.parametrize import is_foreign, iter_packed, parametrization_list
from .fitted import decoder_layers


def expert_groups(model: nn.Module) -> dict[str, list[PackedList]]:
    """Return packed weights by the name of their decoder layer, in the layers' order.

    Experts outside of any decoder layer are a layer of their own; tied ones are the first layer's.
    """
    names = decoder_layers(model)
    groups: dict[str, list[PackedList]] = {}
    homes: dict[int, str] = {}
    for owner, module, name in iter_packed(model):
        packed_list, full = parametrization_list(module, name), unwrapped_name(f"{owner}.{name}")
        if not isinstance(packed_list, PackedList) or is_foreign(module, name):
            raise ConfigError(f"offload_experts: {full} was not packed by this package.")
        if is_share(packed_list.original):
            raise ConfigError(
                f"offload_experts: {full} is sharded over ranks, by an engine with offloading of "
                "its own (FSDP2's CPUOffloadPolicy, ZeRO's zero_optimization.offload_param)."
            )
        if packed_list.original.is_meta:
            raise ConfigError(f"offload_experts: {full} is on meta, without values: load it first.")
        around = [each for each in names if owner == each or owner.startswith(f"{each}.")]
        home = homes.setdefault(id(packed_list.original), max(around, key=len, default=owner))
        groups.setdefault(home, []).append(packed_list)
    return groups


def device_of_layers(
    model: nn.Module, groups: dict[str, list[PackedList]], chosen: dict[str, Any]
) -> torch.device:
    """Return the one device that computes these layers; raise where they cannot be offloaded."""
    devices = set()
    for name in chosen:
        layer = model.get_submodule(name)
        packed = {id(each.original) for each in groups[name]}
        plain = {p.device for p in layer.parameters() if id(p) not in packed and not p.is_meta}
        devices |= plain or {groups[name][0].original.device}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise ConfigError(
            f"offload_experts: the layers lie on {found}; experts in host memory are for one "
            "device."
        )
    device: torch.device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"offload_experts copies to CUDA, and the layers lie on {device}.")
    return device


def tied_lists(lists: Iterable[PackedList]) -> list[list[PackedList]]:
    """Return the lists of each weight."""
    tied: dict[int, list[PackedList]] = {}
    for each in lists:
        tied.setdefault(id(each.original), []).append(each)
    return list(tied.values())
