"""Weights that a model ties: one tensor under several names, which an adapter may tell apart."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..errors import AdapterError
from .adapter import Adapter, Updates
from .base import Base
from .conversion import same_bits


class Ties:
    """Tied weights: one tensor under several names, of which the disk mostly has one.

    Args:
        model: On meta, tied.
        base: Says which names lie on disk.
        adapter: Whose changes go to all of them.
    """

    def __init__(self, model: nn.Module, base: Base, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._names: dict[int, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(tensor), []).append(name)
        self._groups = {name: group for group in base.layout.groups for name in group.shapes}

    def settle(self, updates: Updates) -> Updates:
        """The same changes, by the names that lie on disk.

        Raises:
            AdapterError: Two names of one tensor are changed in different ways.
        """
        shared: list[tuple[str, str]] = []
        for names in self._names.values():
            if len(names) < 2:
                continue
            stored = [name for name in names if name in self._groups]
            updates.tied.update(set(names) - set(stored))
            for name in names:  # PEFT saves the base's own embeddings beside LoRA on them
                if name in updates.values and stored and self._unchanged(updates, name, stored[0]):
                    del updates.values[name]
            asked = [n for n in names if n in updates.terms or n in updates.values]
            if not asked or self._differ(stored):
                continue
            first, *others = asked
            for other in others:
                if not self._same(updates, first, other):
                    raise AdapterError(
                        f"{self._adapter.folder} changes {first} and {other} in different ways, "
                        "and the base ties them: one tensor on disk cannot hold both; untie them "
                        "in the base first."
                    )
            if updates.values.get(first) and len(others) + 1 < len(names):
                left = next(name for name in names if name not in asked)
                raise AdapterError(
                    f"{self._adapter.folder} holds {first} trained in full, which the base ties "
                    f"to {left}, which was not: one tensor on disk cannot hold both; untie them in "
                    "the base first."
                )
            if first in updates.terms and len(asked) < len(names):
                shared.append((first, next(name for name in names if name not in asked)))
            terms, value = updates.terms.get(first), updates.values.get(first)
            for name in asked:
                updates.terms.pop(name, None)
                updates.values.pop(name, None)
            for name in stored:
                if terms is not None:
                    updates.terms[name] = terms
                if value is not None:
                    updates.values[name] = value
        if shared:
            name, other = shared[0]
            more = f" (and {len(shared) - 1} more such pairs)" if len(shared) > 1 else ""
            warnings.warn(
                f"{name} is tied to {other}{more}: merging LoRA into one changes both, as PEFT's "
                "own merge does.",
                UserWarning,
                stacklevel=4,
            )
        return updates

    def _unchanged(self, updates: Updates, name: str, stored: str) -> bool:
        """Whether what is said to be trained in full has the base's values."""
        group, key = self._groups[stored], updates.values[name]
        for start, stop in group.slices():
            old = self._base.values(group, start, stop)[stored]
            new = self._adapter.file.read(key)[start:stop]
            if not same_bits(new.to(old.dtype), old):
                return False
        return True

    def _differ(self, stored: list[str]) -> bool:
        """Whether the base has several and they are not equal: transformers then unties them."""
        if len(stored) < 2:
            return False
        first = self._groups[stored[0]]
        for start, stop in first.slices():
            left = self._base.values(first, start, stop)[stored[0]]
            for other in stored[1:]:
                right = self._base.values(self._groups[other], start, stop)[other]
                if not same_bits(left, right):
                    return True
        return False

    def _same(self, updates: Updates, left: str, right: str) -> bool:
        file = self._adapter.file
        values = [updates.values.get(name) for name in (left, right)]
        if (values[0] is None) != (values[1] is None):
            return False
        if values[0] and values[1] and not same_bits(file.read(values[0]), file.read(values[1])):
            return False
        terms = [updates.terms.get(name, []) for name in (left, right)]
        if len(terms[0]) != len(terms[1]):
            return False
        return all(
            one.scaling == other.scaling
            and all(
                same_bits(a, b)
                for a, b in zip(
                    one.factors(file, torch.float32),
                    other.factors(file, torch.float32),
                    strict=True,
                )
            )
            for one, other in zip(*terms, strict=True)
        )
