"""LoRA on some experts of a weight: factors of the chosen ones are all that is held and trained.

A `ChosenFactor` holds the chosen experts' rows (or columns) of a factor. Whoever computes gets the
factor of all experts, with zeros for the others, and so do state dicts and files: stock PEFT reads
such a folder as it is, and computes the same. This package finds the choice in the note beside the
adapter, and holds the chosen experts' factors again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError

Chosen: TypeAlias = Mapping[str, tuple[int, ...]]
"""The experts with LoRA by the full name of the weight, ascending."""


def choose_experts(
    packed: Mapping[str, Sequence[int]], asked: Mapping[str, Collection[int]]
) -> dict[str, tuple[int, ...]]:
    """Return the chosen experts of each expert weight.

    `packed` are the shapes of the packed weights by full name; `asked` are indices of experts by
    name of the experts module, as from `hot_experts`, or of one weight.

    Raises:
        ConfigError: A name is no experts module, an index no expert, or nothing is chosen.
    """
    modules = {name.rpartition(".")[0] for name in packed}
    chosen: dict[str, tuple[int, ...]] = {}
    for name, indices in asked.items():
        if name not in modules and name not in packed:
            near = get_close_matches(name, [*modules, *packed], n=1)
            say = f"; did you mean {near[0]!r}" if near else ""
            raise ConfigError(f"experts names {name!r}, which holds no packed experts{say}.")
        value: Any = indices
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(
                f"experts[{name!r}] is {value!r}; give a list of experts' indices, as in [1, 2]."
            )
        for weight, shape in packed.items():
            if name not in (weight, weight.rpartition(".")[0]):
                continue
            experts = sorted({int(index) for index in indices})
            wrong = [index for index in experts if not 0 <= index < shape[0]]
            if wrong or len(shape) != 3:
                what = f"expert {wrong[0]}" if wrong else "single experts"
                raise ConfigError(
                    f"experts asks for {what} of {weight}, a weight of shape {tuple(shape)}; name "
                    f"experts from 0 to {shape[0] - 1} of weights that have three dimensions."
                )
            if experts:
                # The experts module may be named too: its experts and this weight's are joined.
                chosen[weight] = tuple(sorted({*chosen.get(weight, ()), *experts}))
    if not chosen:
        raise ConfigError("experts chooses no expert of any layer; name some, or leave it out.")
    return chosen


class ChosenFactor(nn.Module):
    """One LoRA factor of some of a weight's experts; in state dicts that of all, others zero.

    `weight` is `(n r, in)` with the expert slowest for `lora_A`, `(out, r n)` with the expert
    fastest for `lora_B`, of the n experts that are chosen.
    """

    index: Tensor

    def __init__(
        self, whole: nn.Parameter, experts: tuple[int, ...], num_experts: int, *, slowest: bool
    ) -> None:
        super().__init__()
        self.experts, self.num_experts, self.slowest = experts, num_experts, slowest
        index = torch.tensor(experts, device=whole.device)
        self.register_buffer("index", index, persistent=False)
        self.weight = nn.Parameter(self.select(whole.detach()), whole.requires_grad)

    def whole(self) -> Tensor:
        """Return the factor of all experts, `(E r, in)` or `(out, r E)`."""
        weight, count = self.weight, len(self.experts)
        if hasattr(weight, "full_tensor"):  # a state dict of a model that FSDP2 shards
            weight = cast(Any, weight).full_tensor()
        if self.slowest:
            parts = weight.view(count, -1, weight.shape[-1])
            others = parts.new_zeros(self.num_experts, *parts.shape[1:])
            return others.index_copy(0, self.index, parts).flatten(0, 1)
        parts = weight.view(len(weight), -1, count)
        others = parts.new_zeros(*parts.shape[:2], self.num_experts)
        return others.index_copy(2, self.index, parts).flatten(1)

    def select(self, whole: Tensor) -> Tensor:
        """Return the chosen experts' part of a factor of all experts, a copy."""
        by_expert = self._by_expert(whole)
        chosen = by_expert.index_select(0 if self.slowest else 2, self.index.to(whole.device))
        return chosen.flatten(0, 1) if self.slowest else chosen.flatten(1)

    def _by_expert(self, whole: Tensor) -> Tensor:
        if self.slowest:
            return whole.reshape(self.num_experts, -1, whole.shape[-1])
        return whole.reshape(len(whole), -1, self.num_experts)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        whole = self.whole()
        destination[f"{prefix}weight"] = whole if keep_vars else whole.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = f"{prefix}weight"
        tensor = state_dict.get(key)
        across = 0 if self.slowest else 1
        wanted = list(self.weight.shape)
        wanted[across] = wanted[across] // len(self.experts) * self.num_experts
        if tensor is not None and list(tensor.shape) == wanted:
            if self.index.is_meta:
                self.index = torch.tensor(self.experts, device=tensor.device)
            # The zero of lora_B alone makes an expert's product zero.
            if not self.slowest and not tensor.is_meta and (others := self._trained(tensor)):
                error_msgs.append(
                    f"{key} has LoRA on expert {others[0]}, which is not one of the "
                    f"{len(self.experts)} of {self.num_experts} that were chosen"
                )
                return
            state_dict[key] = self.select(tensor)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _trained(self, b: Tensor) -> list[int]:
        """Return the experts that are not chosen and whose part of a whole `lora_B` is not zero."""
        held = self._by_expert(b).ne(0).any(0).any(0).nonzero().flatten().tolist()
        return [expert for expert in held if expert not in self.experts]


def whole_factor(factor: nn.Module) -> Tensor:
    """Return a LoRA factor of all experts, `(E r, in)` or `(out, r E)`."""
    return factor.whole() if isinstance(factor, ChosenFactor) else cast(Tensor, factor.weight)
