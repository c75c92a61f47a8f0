"""Merging LoRA into packed weights, one expert at a time, and undoing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError
from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from ..packing import codec, parametrize
from ..packing.decoders import PackedCodes
from ..packing.settings import KEPT_KINDS, CodecSettings

Product = tuple[Tensor, Tensor, float]
"""`left` `(E, rows, r)`, `right` `(E, r, columns)` in the weight's layout, and their scaling."""


def merged_weight(
    packed: PackedWeight, products: Sequence[Product], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the decoded weight + the sum of the products, summed in fp32 and rounded once."""
    out = torch.empty(packed.shape, dtype=dtype or packed.dtype, device=packed.device)
    wide = torch.promote_types(packed.dtype, torch.float32)
    with torch.no_grad():
        products = [(left.to(wide), right.to(wide), scaling) for left, right, scaling in products]
        if len(packed.shape) == 2:  # one matrix, whatever number of experts it holds
            total = codec.unpack(packed).to(wide)
            for left, right, scaling in products:
                total.addmm_(left[0], right[0], alpha=scaling)
            return out.copy_(total)
        for expert in range(packed.shape[0]):
            total = codec.unpack_range(packed, expert, expert + 1, dtype=wide)[0]
            for left, right, scaling in products:
                total.addmm_(left[expert], right[expert], alpha=scaling)
            out[expert].copy_(total)
    return out


def check_repack(model: nn.Module) -> None:
    """Raise where merged weights could not be packed the way that the model's are."""
    for module_name, module, leaf in parametrize.iter_packed(model):
        kind = parametrize.read_packed(module, leaf).kind
        if kind in KEPT_KINDS:
            raise AdapterError(
                f"{unwrapped_name(f'{module_name}.{leaf}')} keeps the {kind} codes of its "
                "checkpoint, in which most of an adapter would be rounded away: merge it without "
                "repack=True."
            )


def replace_parameter(
    module: nn.Module, name: str, weight: Tensor, like: PackedWeight | None
) -> None:
    """Replace a parameter, packed or plain, by `weight`: plain, or packed the way `like` was."""
    if parametrize.is_packed(module, name):
        parametrize.detach(module, name, weight)
    else:
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    if like is not None:
        parametrize.attach(module, name, codec.pack(weight, CodecSettings.of(like)))


def restore_packed(module: nn.Module, name: str, packed: PackedWeight) -> None:
    """Put a packed weight back, on the device where the module's parameter is now."""
    was_packed = parametrize.is_packed(module, name)
    old: Any = parametrize.original_of(module, name) if was_packed else module._parameters[name]
    replace_parameter(module, name, torch.empty(0, device=old.device), None)
    moved = packed if packed.device == old.device else packed.to(old.device)
    if isinstance(moved.owner, PackedCodes):  # of the other layout, which is for sharding
        moved = replace(moved, owner=None)
    parametrize.attach(module, name, moved)
