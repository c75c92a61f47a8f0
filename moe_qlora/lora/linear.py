"""PEFT's layers over Linear layers, where ours do more; weighted sums of adapters.

PEFT merges into a packed Linear layer by packing W + s B A again, which rounds away much of s B A,
and unmerges by subtracting from that and packing a third time. Here `unmerge` puts the original
codes back, and `merge` in a given dtype makes the layer a plain `nn.Linear` until then: W + s B A,
summed in fp32 and rounded once.

Some modules read the weight of a Linear layer instead of calling it, as Longcat's routers and Mamba
layers do: there it is W + s B A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import bnb as stock
from peft.tuners.lora.layer import Linear as StockLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..detection.weight_reads import weights_read
from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from ..packing.codec import unpack
from ..packing.codecs import codec_of
from ..packing.decoders import read_linear, restore_linear, write_linear
from .layer import ParamWrapper


def use_own_layers(model: nn.Module) -> None:
    """Turn PEFT's layers into ours, in place."""
    for name in weights_read(model):
        layer = model.get_submodule(name)
        if type(layer) is StockLinear:
            layer.__class__ = ReadLinear
    for module in model.modules():
        for own in (Linear4bit, Linear8bitLt):
            if type(module) is own.__bases__[1]:
                module.__class__ = own


class ReadLinear(StockLinear):
    """LoRA on a Linear layer that is also right where its weight is read: it is W + s B A then.

    The sum has W's dtype, as the code around it expects. Dropout is for calls alone.
    """

    @property
    def weight(self: Any) -> Tensor:
        weight: Tensor = self.get_base_layer().weight
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                if name in self.lora_A and name not in self.lora_variant:
                    weight = weight + self.get_delta_weight(name).to(weight.dtype)
        return weight


class _Unmerged(NamedTuple):
    layer: Any
    packed: PackedWeight
    bias: Tensor | None


class _ExactMerge:
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
            write_linear(layer, packed)  # in PEFT's layout, with objects that it may change
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
        """Restore the codes from before `merge`, bit for bit."""
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


def summed_config(model: nn.Module, first: LoraConfig, adapters: Sequence[str]) -> LoraConfig:
    """Return a config that targets what any of the adapters is on, with scaling 1.

    PEFT uses the first adapter's config for a sum, and only joins the `target_modules`: other
    targets of the other adapters would be lost, and with the first one's `use_rslora` the sum would
    be scaled by the root of the rank.
    """
    modules, parameters = set[str](), list[str]()
    for path, module in model.named_modules():
        name, layer = unwrapped_name(path), cast(Any, module)
        if not isinstance(module, LoraLayer) or not any(
            a in layer.lora_A or a in layer.lora_embedding_A for a in adapters
        ):
            continue
        if isinstance(module, StockParamWrapper):
            parameters.append(f"{name}.{module.parameter_name}")
        else:
            modules.add(name)
    scope = dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    targets: dict[str, Any] = {"target_modules": modules, "target_parameters": parameters or None}
    return replace(first, use_rslora=False, **scope, **targets)


def concatenate(
    wrapper: ParamWrapper, adapters: Sequence[str], weights: Sequence[float], adapter_name: str
) -> None:
    """Set an adapter to the weighted sum of others by concatenating ranks within each expert."""
    left, right = [], []
    for name, weight in zip(adapters, weights, strict=True):
        if name in wrapper.lora_A:
            a, b = wrapper.expert_factors(name)
            left.append(a * (weight * wrapper.scaling[name]))
            right.append(b)
    a, b = torch.cat(left, dim=1), torch.cat(right, dim=2)
    missing = wrapper.r[adapter_name] - a.shape[1]
    a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    wrapper.lora_A[adapter_name].weight.data = a.flatten(0, 1).contiguous()
    wrapper.lora_B[adapter_name].weight.data = b.permute(1, 2, 0).flatten(1).contiguous()
