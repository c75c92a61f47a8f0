"""Tied weights: one tensor under several names, which an adapter may change in different ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError
from .adapter import Adapter, LoraDelta, Updates, vocabulary
from .base import Base
from .conversion import same_bits
from .reader import Checkpoint


def move_to_stored_names(updates: Updates, model: nn.Module, base: Base, adapter: Adapter) -> None:
    """Put each change of a weight that the model on meta ties under names on disk, in place.

    Embeddings and head that the adapter changes in different ways are untied: `updates.untied`.
    """
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
        _share(updates, model, names)
        changed = [n for n in names if n in updates.deltas or n in updates.replacements]
        if not changed or stored_apart(base, stored):
            continue
        if not _agree(adapter.file, updates, names):
            _untie(updates, model, adapter, names, stored)
            continue
        others = [name for name in names if name not in updates.deltas]
        first = next((name for name in changed if name in updates.deltas), "")
        if first and others:
            shared.append((first, others[0]))
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


def _share(updates: Updates, model: nn.Module, names: list[str]) -> None:
    keys = [updates.replacements[name] for name in names if name in updates.replacements]
    if len(keys) == 1 and keys[0].endswith(".base_layer.weight"):  # resized, beside LoRA on it
        updates.replacements.update(dict.fromkeys(names, keys[0]))
    tokens = {n: [one for one in updates.deltas.get(n, ()) if one.tokens] for n in names}
    inputs = set(names) - set(vocabulary(model, inputs=False))
    trained = next((tokens[name] for name in names if name in inputs and tokens[name]), [])
    for name in names if trained else ():
        if not tokens[name]:
            updates.deltas[name] = [*trained, *updates.deltas.get(name, ())]


def _untie(
    updates: Updates, model: Any, adapter: Adapter, names: list[str], stored: list[str]
) -> None:
    config = model.config
    both = {config.tie_word_embeddings, config.get_text_config().tie_word_embeddings}
    if True not in both or not stored or not set(names) <= set(vocabulary(model)):
        raise AdapterError(
            f"{adapter.folder} changes {names[0]} and {names[1]} in different ways, and the base "
            "ties them: one tensor on disk cannot hold both; untie them in the base first."
        )
    updates.untied.update(dict.fromkeys(names, stored[0]))
    updates.tied.difference_update(names)


def _unchanged(base: Base, adapter: Adapter, key: str, stored: str) -> bool:
    group = base.layout.by_name[stored]
    if adapter.file.info(key).shape != group.shapes[stored]:
        return False
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


def _agree(file: Checkpoint, updates: Updates, names: list[str]) -> bool:
    """Whether one tensor can hold all changes; LoRA on one of the names counts for all."""
    replaced = [updates.replacements[name] for name in names if name in updates.replacements]
    adapted = [updates.deltas[name] for name in names if name in updates.deltas]
    tokens = any(one.tokens for deltas in adapted for one in deltas)
    if len(replaced) not in (0, len(names)) or (tokens and len(adapted) < len(names)):
        return False
    return all(same_bits(file.read(replaced[0]), file.read(key)) for key in replaced[1:]) and all(
        _same_deltas(file, adapted[0], other) for other in adapted[1:]
    )


def _same_deltas(file: Checkpoint, left: list[LoraDelta], right: list[LoraDelta]) -> bool:
    if [(one.scaling, one.tokens) for one in left] != [(one.scaling, one.tokens) for one in right]:
        return False
    factors = [
        [factor for one in deltas for factor in one.factors(file, torch.float32)]
        for deltas in (left, right)
    ]
    return all(map(same_bits, *factors))
