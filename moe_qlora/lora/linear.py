"""PEFT's LoRA layers over bitsandbytes' Linear layers, which merge exactly and unmerge bit for bit.

PEFT packs W + s B A again, which rounds away much of s B A, and to unmerge it subtracts from that
and packs a third time. Here `unmerge` puts the original codes back, and `merge` in a given dtype
makes the layer a plain `nn.Linear` meanwhile: W + s B A, summed in fp32 and rounded once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora import bnb as stock
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..kernels.weights import PackedWeight
from ..packing.codec import unpack
from ..packing.codecs import codec_of
from ..packing.linear import read_linear, restore_linear, write_linear


class _Unmerged(NamedTuple):
    """What a layer was before its first merge."""

    layer: Any
    packed: PackedWeight
    bias: Tensor | None


class _ExactMerge:
    """What `Linear4bit` and `Linear8bitLt` have in common."""

    base_layer: Any
    merge_dtype: torch.dtype | None = None  # of the merged plain weight; None packs it again
    _unmerged: _Unmerged | None = None

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base weight: into a plain one where `merge_dtype` is set."""
        asked = check_adapters_to_merge(self, adapter_names)
        names = [name for name in asked if name in self.lora_A]
        plain = self._unmerged is not None and self.base_layer is not self._unmerged.layer
        dtype = self.merge_dtype or (self.base_layer.weight.dtype if plain else None)
        if not names and (dtype is None or not self.merged or plain):
            return
        if self._unmerged is None:
            layer = self.base_layer
            packed = read_linear(layer)
            bias = None if layer.bias is None else layer.bias.data
            self._unmerged = _Unmerged(layer, packed, bias)
            write_linear(layer, packed)  # as PEFT knows it, and whose own objects it may change
        if dtype is None:
            cast(Any, super()).merge(safe_merge=safe_merge, adapter_names=names)
        else:
            self._merge_plain(dtype, safe_merge, names)

    def _merge_plain(self: Any, dtype: torch.dtype, safe_merge: bool, names: list[str]) -> None:
        layer, packed, bias = self._unmerged
        every = [*self.merged_adapters, *names]
        with torch.no_grad():
            if codec_of(packed.kind).loads_in_8bit:  # which bitsandbytes dequantizes in fp32
                packed = replace(packed, dtype=torch.float32)
            weight = unpack(packed).to(torch.promote_types(packed.dtype, torch.float32))
            for name in every:
                if name in self.lora_variant:
                    weight = self.lora_variant[name].merge_safe(self, name, weight)
                    continue
                a, b = (part[name].weight.to(weight) for part in (self.lora_A, self.lora_B))
                weight.addmm_(b, a, alpha=self.scaling[name])
            for name in (name for name in every if self.lora_bias[name]):
                bias = bias + self.lora_B[name].bias
        if safe_merge and not all(t.isfinite().all() for t in (weight, bias) if t is not None):
            raise ValueError(
                f"NaNs detected in the merged weights. The adapter {every[-1]} seems to be broken"
            )
        merged = nn.Linear(layer.in_features, layer.out_features, bias is not None, device="meta")
        merged.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if bias is not None:
            merged.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.base_layer = merged.train(layer.training)
        self.merged_adapters.extend(names)

    def unmerge(self: Any) -> None:
        """Put the codes back that were there before `merge`, bit for bit."""
        if self._unmerged is None:
            cast(Any, super()).unmerge()
            return
        layer, packed, bias = self._unmerged
        device = self.base_layer.weight.device
        restore_linear(layer)
        write_linear(layer, packed if packed.device == device else packed.to(device))
        if bias is not None:
            layer.bias.data = bias.to(device)
        self.base_layer, self._unmerged = layer, None
        self.merged_adapters.clear()


class Linear4bit(_ExactMerge, stock.Linear4bit):
    """LoRA on a 4-bit Linear layer."""


class Linear8bitLt(_ExactMerge, stock.Linear8bitLt):
    """LoRA on an 8-bit Linear layer."""


def merge_exactly(model: nn.Module) -> None:
    """Turn PEFT's layers over bitsandbytes' Linear layers into those of this file, in place."""
    for module in model.modules():
        for own in (Linear4bit, Linear8bitLt):
            if type(module) is own.__bases__[1]:
                module.__class__ = own
