"""Weighted sums of adapters on expert parameters (`add_weighted_adapter`), expert by expert.

PEFT combines the adapters of one Linear layer. `concatenate` does that for each expert of a wrapper
where ranks are concatenated; for the other ways `SingleExpert` shows PEFT one expert at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layer import ParamWrapper


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
