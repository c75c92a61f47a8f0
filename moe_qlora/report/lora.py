"""What LoRA covers: of an adapter's folder, or of a live model with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn

from ..checkpoint.adapter import Resolver, check_adapter_patterns, open_adapter
from ..checkpoint.rounding import chosen_experts
from ..layout import ModelLayout, name_pattern, unwrapped, unwrapped_name
from .pieces import LoraGroup, LoraPiece


@dataclass(frozen=True, slots=True)
class _Adapted:
    """One weight with LoRA."""

    rank: int
    trained: int  # Weights of both factors, and of a bias
    chosen: int = 0  # Experts that have it, 0 where all do


def of_folder(folder: Path, model: nn.Module, layout: ModelLayout, total: int) -> LoraPiece:
    """Return what the adapter of a folder covers of a model on meta, by its own file.

    An adapter that is damaged, of another kind than LoRA or of another model raises as
    `merge_adapter` does.
    """
    opened, chosen = open_adapter(folder), chosen_experts(folder) or {}
    check_adapter_patterns(folder, model)
    adapted: dict[str, _Adapted] = {}
    others = 0
    with closing(opened.file) as file:
        updates = Resolver(model, {}, opened).resolve()
        for name, deltas in updates.deltas.items():
            keys = {key for delta in deltas for key in (delta.a, delta.b)}
            trained = sum(prod(file.info(key).shape) for key in keys)
            first = deltas[0]
            if first.bias:
                others += trained
                continue
            rank = file.info(first.a).shape[0] // max(first.experts, 1)
            some = len(chosen.get(name, ()))
            if some:  # the file has zeros for the others
                trained = trained * some // first.experts
            adapted[name] = _Adapted(rank, trained, some)
        others += sum(prod(file.info(key).shape) for key in updates.replacements.values())
    return LoraPiece(str(folder), _groups(model, layout, adapted), others, total)


def active_adapters(model: Any) -> list[str]:
    """Return the names of a model's active adapters, PEFT's or those that transformers added."""
    active = getattr(model, "active_adapters", ()) if getattr(model, "peft_config", None) else ()
    return list(active() if callable(active) else active)


def of_live(model: Any, layout: ModelLayout, total: int) -> LoraPiece:
    """Return what the active adapters of a model in memory cover."""
    names = active_adapters(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    configs = [model.peft_config[name] for name in names]
    chosen = {k: v for config in configs for k, v in getattr(config, "_chosen", {}).items()}
    adapted: dict[str, _Adapted] = {}
    counted = 0
    for path, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        ranks = [module.r[name] for name in names if name in module.r]
        factors: list[Any] = [module.lora_A, module.lora_B]
        factors += [module.lora_embedding_A, module.lora_embedding_B]
        sizes = [
            parameter.numel()
            for part in factors
            for key, value in part.items()
            if key in names
            for parameter in (value.parameters() if isinstance(value, nn.Module) else [value])
        ]
        if ranks:
            leaf = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            name = f"{unwrapped_name(path)}.{leaf}"
            adapted[name] = _Adapted(max(ranks), sum(sizes), len(chosen.get(name, ())))
            counted += sum(sizes)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    groups = _groups(base, layout, adapted)
    return LoraPiece(", ".join(names), groups, max(trained - counted, 0), total)


def _groups(
    model: nn.Module, layout: ModelLayout, adapted: Mapping[str, _Adapted]
) -> tuple[LoraGroup, ...]:
    """Return expert weights, Linear layers and whatever else has LoRA, by pattern."""
    experts = {param.name for param in layout.experts}
    weights = [
        f"{unwrapped_name(path)}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in path and unwrapped(module) is module
    ]
    names = dict.fromkeys((*weights, *experts, *adapted))
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(name_pattern(name), []).append(name)
    groups = []
    for pattern, members in by_pattern.items():
        have = [adapted[name] for name in members if name in adapted]
        groups.append(
            LoraGroup(
                pattern.removesuffix(".weight"),
                members[0] in experts,
                len(members),
                len(have),
                tuple(sorted({one.rank for one in have})),
                sum(one.trained for one in have),
                tuple(sorted({one.chosen for one in have if one.chosen})),
            )
        )
    return tuple(sorted(groups, key=lambda group: (not group.covered, group.pattern)))
