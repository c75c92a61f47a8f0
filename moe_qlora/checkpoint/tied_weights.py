"""Tied weights: one tensor under several names, which an adapter may change in different ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError
from .adapter import Adapter, Updates
from .base import Base
from .conversion import same_bits
from .reader import Checkpoint


def move_to_stored_names(updates: Updates, model: nn.Module, base: Base, adapter: Adapter) -> None:
    """Put each change of a weight that the model on meta ties under names on disk, in place."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(tensor), []).append(name)
    shared: list[tuple[str, str]] = []
    for names in (names for names in by_tensor.values() if len(names) > 1):
        stored = [name for name in names if name in base.layout.by_name]
        updates.tied.update(set(names) - set(stored))
        for name in names:  # PEFT saves the base's own embeddings beside LoRA on them
            key = updates.replacements.get(name)
            if key is not None and stored and _unchanged(base, adapter, key, stored[0]):
                del updates.replacements[name]
        changed = [n for n in names if n in updates.deltas or n in updates.replacements]
        if not changed or stored_apart(base, stored):
            continue
        _check_agreement(adapter, updates, names, changed)
        others = [name for name in names if name not in changed]
        if changed[0] in updates.deltas and others:
            shared.append((changed[0], others[0]))
        kinds: tuple[dict[str, Any], ...] = (updates.deltas, updates.replacements)
        for changes in kinds:
            moved = [changes.pop(name) for name in changed if name in changes]
            if moved:  # all alike
                changes.update(dict.fromkeys(stored, moved[0]))
    if shared:
        name, other = shared[0]
        more = f" (and {len(shared) - 1} more such pairs)" if len(shared) > 1 else ""
        warnings.warn(
            f"{name} is tied to {other}{more}: merging LoRA into one changes both, as PEFT's "
            "own merge does.",
            UserWarning,
            stacklevel=4,
        )


def _unchanged(base: Base, adapter: Adapter, key: str, stored: str) -> bool:
    """Whether a weight that the adapter holds in full has the base's values."""
    group = base.layout.by_name[stored]
    for start, stop in group.slices():
        old = base.values(group, start, stop)[stored]
        new = adapter.file.read(key)[start:stop]
        if not same_bits(new.to(old.dtype), old):
            return False
    return True


def stored_apart(base: Base, stored: list[str]) -> bool:
    """Whether the base stores several that are not equal: transformers then unties them."""
    if len(stored) < 2:
        return False
    first = base.layout.by_name[stored[0]]
    for start, stop in first.slices():
        left = base.values(first, start, stop)[stored[0]]
        others = (base.values(base.layout.by_name[n], start, stop)[n] for n in stored[1:])
        if not all(same_bits(left, other) for other in others):
            return True
    return False


def _check_agreement(
    adapter: Adapter, updates: Updates, names: list[str], changed: list[str]
) -> None:
    """Raise where one tensor on disk cannot hold what becomes of all its names."""
    first, *others = changed
    for other in others:
        if not _same_change(adapter.file, updates, first, other):
            raise AdapterError(
                f"{adapter.folder} changes {first} and {other} in different ways, "
                "and the base ties them: one tensor on disk cannot hold both; untie them "
                "in the base first."
            )
    left = next((name for name in names if name not in changed), None)
    if left is not None and first in updates.replacements:
        raise AdapterError(
            f"{adapter.folder} holds {first} trained in full, which the base ties "
            f"to {left}, which was not: one tensor on disk cannot hold both; untie them in "
            "the base first."
        )


def _same_change(file: Checkpoint, updates: Updates, left: str, right: str) -> bool:
    def change(name: str) -> tuple[tuple[bool, list[float]], list[Tensor]]:
        key, deltas = updates.replacements.get(name), updates.deltas.get(name, [])
        tensors = [] if key is None else [file.read(key)]
        tensors += [factor for one in deltas for factor in one.factors(file, torch.float32)]
        return (key is None, [one.scaling for one in deltas]), tensors

    (kind, tensors), (other_kind, others) = change(left), change(right)
    return kind == other_kind and all(map(same_bits, tensors, others))
