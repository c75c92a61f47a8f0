"""Merged and summed adapters: PEFT's layers over bitsandbytes' Linear layers, weighted sums.

PEFT merges into a packed Linear layer by packing W + s B A again, which rounds away much of s B A,
and unmerges by subtracting from that and packing a third time. Here `unmerge` puts the original
codes back, and `merge` in a given dtype makes the layer a plain `nn.Linear` until then: W + s B A,
summed in fp32 and rounded once.

For `add_weighted_adapter` PEFT combines the adapters of one Linear layer. `concatenate` combines
those of each expert of a wrapper where ranks are concatenated; for the other combinations
`SingleExpert` shows PEFT one expert at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import bnb as stock
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..kernels.weights import PackedWeight
from ..layout import unwrapped_name
from ..packing.codec import unpack
from ..packing.codecs import codec_of
from ..packing.decoders import read_linear, restore_linear, write_linear
from .layer import ParamWrapper

_SCOPE = ("exclude_modules", "layers_to_transform", "layers_pattern")


def summed_config(model: nn.Module, configs: Sequence[LoraConfig], adapters: list[str]) -> Any:
    """Return a config that targets the union of the adapters' targets, with scaling 1.

    PEFT uses the first adapter's config for a sum, and only joins the `target_modules`: other
    targets of the other adapters would be lost, and with the first one's `use_rslora` the sum would
    be scaled by the root of the rank.
    """
    scopes = [[getattr(config, field) for field in _SCOPE] for config in configs]
    sets = all(isinstance(config.target_modules, set) for config in configs)
    if sets and all(scope == scopes[0] for scope in scopes):
        modules = set().union(*(config.target_modules for config in configs))
        parameters = [name for config in configs for name in config.target_parameters or ()]
        scope = {}
    else:
        modules, parameters = _adapted(model, adapters)
        scope = dict.fromkeys(_SCOPE)
    scope |= {
        "target_modules": modules,
        "target_parameters": list(dict.fromkeys(parameters)) or None,
    }
    return replace(configs[0], use_rslora=False, **scope)


def _adapted(model: nn.Module, adapters: list[str]) -> tuple[set[str], list[str]]:
    modules: set[str] = set()
    parameters: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not any(a in module.lora_A or a in module.lora_embedding_A for a in adapters):
            continue
        if isinstance(module, StockParamWrapper):
            parameters.append(f"{unwrapped_name(name)}.{module.parameter_name}")
        else:
            modules.add(unwrapped_name(name))
    return modules, parameters


def concatenate(
    wrapper: ParamWrapper, adapters: list[str], weights: list[float], adapter_name: str
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
    wrapper.lora_A[adapter_name].weight.data, wrapper.lora_B[adapter_name].weight.data = (
        stored_factors(list(zip(a, b, strict=True)))
    )


class SingleExpert:
    """One expert as PEFT's SVD sees a layer: its adapters, and the delta as `(out, in)`."""

    def __init__(self, wrapper: ParamWrapper, expert: int) -> None:
        self.lora_A = wrapper.lora_A
        self.lora_embedding_A: dict[str, Any] = {}
        self._wrapper, self._expert = wrapper, expert

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        a, b = self._wrapper.expert_factors(adapter_name)
        delta: Tensor = b[self._expert] @ a[self._expert]
        return delta * self._wrapper.scaling[adapter_name]


def stored_factors(experts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return each expert's `(r, in)`, `(out, r)` as PEFT stores them: `(E r, in)`, `(out, r E)`."""
    a, b = zip(*experts, strict=True)
    return torch.cat(a).contiguous(), torch.stack(b, dim=-1).flatten(1).contiguous()


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


def merge_exactly(model: nn.Module) -> None:
    """Turn PEFT's layers over bitsandbytes' Linear layers into those of this file, in place."""
    for module in model.modules():
        for own in (Linear4bit, Linear8bitLt):
            if type(module) is own.__bases__[1]:
                module.__class__ = own
