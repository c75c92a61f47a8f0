"""moe_qlora/lora/combine.py: to be described."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import layer


class _SingleExpert:
    """One expert as PEFT's SVD sees a layer: its adapters, and the delta as `(out, in)`."""

    def __init__(self, wrapper: layer.ParamWrapper, expert: int) -> None:
        self.lora_A = wrapper.lora_A
        self.lora_embedding_A: dict[str, Any] = {}
        # the delta is scaled already; PEFT 0.20 scales it once more
        self.scaling = dict.fromkeys(wrapper.scaling, 1.0)
        self._wrapper, self._expert = wrapper, expert

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        a, b = expert_factors(self._wrapper, adapter_name)
        delta: Tensor = b[self._expert] @ a[self._expert]
        return delta * self._wrapper.scaling[adapter_name]


def _single_experts(wrapper: layer.ParamWrapper) -> list[_SingleExpert]:
    return [_SingleExpert(wrapper, expert) for expert in range(wrapper.num_experts)]


def expert_factors(wrapper: layer.ParamWrapper, adapter_name: str) -> tuple[Tensor, Tensor]:
    """`lora_A` as `(E, r, in)` and `lora_B` as `(E, out, r)`."""
    a, b = (
        wrapper.lora_A[adapter_name].weight.detach(),
        wrapper.lora_B[adapter_name].weight.detach(),
    )
    experts = wrapper.num_experts
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def lora_a(parts: list[Tensor]) -> Tensor:
    """One `(r, in)` for each expert, as PEFT stores them: `(E * r, in)`."""
    return torch.cat(parts, dim=0).contiguous()


def lora_b(parts: list[Tensor]) -> Tensor:
    """One `(out, r)` for each expert, as PEFT stores them: `(out, r * E)`, expert fastest."""
    return torch.stack(parts, dim=-1).flatten(1).contiguous()


def _concatenate(
    wrapper: layer.ParamWrapper, adapters: list[str], weights: list[float], adapter_name: str
) -> None:
    """Stack the ranks within each expert; PEFT's own stacking puts adapter after adapter."""
    left, right = [], []
    for name, weight in zip(adapters, weights, strict=True):
        if name in wrapper.lora_A:
            a, b = expert_factors(wrapper, name)
            left.append(a * (weight * wrapper.scaling[name]))
            right.append(b)
    a, b = torch.cat(left, dim=1), torch.cat(right, dim=2)
    missing = wrapper.r[adapter_name] - a.shape[1]
    a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    wrapper.lora_A[adapter_name].weight.data = lora_a(list(a))
    wrapper.lora_B[adapter_name].weight.data = lora_b(list(b))
