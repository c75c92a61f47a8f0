"""Weighted sums of adapters on expert parameters (`add_weighted_adapter`), expert by expert.

PEFT combines the adapters of one Linear layer. `concatenate` does that for each expert of a wrapper
where ranks are concatenated; for the other ways `SingleExpert` shows PEFT one expert at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from torch import Tensor, nn

from ..layout import unwrapped_name
from .layer import ParamWrapper

_SCOPE = ("exclude_modules", "layers_to_transform", "layers_pattern")


def summed_config(model: nn.Module, configs: Sequence[LoraConfig], adapters: list[str]) -> Any:
    """Return a config for LoRA on all that any of the adapters has it on, which scales by 1.

    PEFT takes the first adapter's config for a sum, and only joins the `target_modules`: what the
    first one does not name would be lost, and with its `use_rslora` the sum would be scaled by the
    root of the rank.
    """
    if _same_scope(configs):
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


def _same_scope(configs: Sequence[LoraConfig]) -> bool:
    """Whether PEFT's union of `target_modules` names what all of these name together."""
    if not all(isinstance(config.target_modules, set) for config in configs):
        return False
    scopes = [[getattr(config, field) for field in _SCOPE] for config in configs]
    return all(scope == scopes[0] for scope in scopes)


def _adapted(model: nn.Module, adapters: list[str]) -> tuple[set[str], list[str]]:
    """Return the full names of modules and of parameters that have one of these adapters."""
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
        # The delta is scaled already, and PEFT 0.20 scales it once more.
        self.scaling = dict.fromkeys(wrapper.scaling, 1.0)
        self._wrapper, self._expert = wrapper, expert

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        a, b = self._wrapper.expert_factors(adapter_name)
        delta: Tensor = b[self._expert] @ a[self._expert]
        return delta * self._wrapper.scaling[adapter_name]


def stored_factors(experts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return each expert's `(r, in)`, `(out, r)` as PEFT stores them: `(E r, in)`, `(out, r E)`."""
    a, b = zip(*experts, strict=True)
    return torch.cat(a).contiguous(), torch.stack(b, dim=-1).flatten(1).contiguous()
