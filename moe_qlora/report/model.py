"""The pieces that need a model's configuration alone: its layout, its bytes, a rehearsed step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import is_packed
from ..checkpoint.verify import WeightError, verify
from ..layout import ExpertParam, ModelLayout, name_pattern
from ..lora.config import top_k_of
from ..memory.budget import Settings
from ..memory.rehearsal import Inventory, rehearse
from ..progress import Progress
from .pieces import (
    ErrorMap,
    ErrorPiece,
    LayoutPiece,
    LinearErrors,
    MemoryPiece,
    Missing,
    WeightGroup,
)


def describe(inventory: Inventory) -> LayoutPiece:
    """Return the layout of a model that was counted."""
    layout, config = inventory.layout, inventory.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return LayoutPiece(
        model_type=str(getattr(config, "model_type", "") or ""),
        packed=inventory.packed,
        groups=tuple(_groups(layout)),
        layers=len(layout.modules),
        experts=tuple(sorted({module.num_experts for module in layout.modules})),
        top_k=top_k_of(config) or top_k_of(text),
        routers=_patterns(router.name for router in layout.routers),
        linear_experts=_patterns(item.name for item in layout.linear_experts),
        rejected=len(layout.rejected),
        kinds=inventory.kinds,
    )


def _groups(layout: ModelLayout) -> Iterable[WeightGroup]:
    alike: dict[tuple[Any, ...], list[ExpertParam]] = {}
    for param in layout.experts:
        key = (param.pattern, param.shape, param.role, param.packed or param.dtype_name)
        alike.setdefault(key, []).append(param)
    for (pattern, shape, role, dtype), params in alike.items():
        yield WeightGroup(pattern, len(params), shape, role, dtype, params[0].evidence)


def _patterns(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(name_pattern(name) for name in names).items())


def rehearsed(
    model: Any,
    quantization_config: Any,
    lora_config: Any,
    *,
    batch: int,
    seq: int,
    length: str,
    trust_remote_code: bool,
) -> MemoryPiece:
    """Rehearse a training step with this LoRA; None is LoRA on attention and experts."""
    settings = Settings(batch=batch, seq=seq, targets="attention,experts")
    if lora_config is not None:
        rank = getattr(lora_config, "r", settings.rank)  # other kinds of adapters have none
        settings = replace(settings, rank=rank, targets="lora_config")
    plan, moments = rehearse(
        model,
        quantization_config,
        settings=settings,
        lora_config=lora_config,
        trust_remote_code=trust_remote_code,
    )
    return MemoryPiece(plan, moments, length)


def grids(errors: tuple[WeightError, ...]) -> dict[str, tuple[list[str], list[list[float]]]]:
    """Return, for each kind of expert weight, its layers and a row of its experts' errors for each.

    Weights of one name but of different numbers of experts are of different kinds.
    """
    panels: dict[str, tuple[list[str], list[list[float]]]] = {}
    for error in errors:
        if not error.expert:
            continue
        pattern = f"{name_pattern(error.name)} ({len(error.experts)} experts)"
        layers, grid = panels.setdefault(pattern, ([], []))
        layers.append(layer_label(error.name))
        grid.append(list(error.experts))
    return panels


def layer_label(name: str) -> str:
    """Return the numbers in a full name, which tell its layer: "3" for `layers.3.mlp`."""
    return ".".join(re.findall(r"(?<![^.])\d+(?![^.])", name)) or "-"


def measure(
    folder: Path | None,
    against: str | Path | None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ErrorPiece | Missing:
    """Compare a packed folder with the checkpoint that it was packed from."""
    if folder is None or not is_packed(folder):
        return Missing(
            "The error is measured of a packed folder: write one with moe-qlora quantize, or "
            "save_pretrained, and report on it."
        )
    if against is None:
        return Missing(
            "The error needs the checkpoint that the folder was packed from: name it with against "
            "(--against on the command line)."
        )
    report = verify(folder, against, trust_remote_code=trust_remote_code, progress=progress)
    if not report.good:
        return Missing(f"The packed folder is damaged: {report.problems[0]}", fault=True)
    maps = tuple(
        ErrorMap(pattern, tuple(layers), tuple(map(tuple, rows)))
        for pattern, (layers, rows) in grids(report.errors).items()
    )
    return ErrorPiece(report.kind, str(against), maps, tuple(_linears(report.errors)))


def _linears(errors: tuple[WeightError, ...]) -> Iterator[LinearErrors]:
    alike: dict[str, list[WeightError]] = {}
    for error in errors:
        if not error.expert:
            alike.setdefault(name_pattern(error.name), []).append(error)
    for pattern, group in alike.items():
        worst = max(group, key=lambda error: error.relative)
        mean = sum(error.relative for error in group) / len(group)
        yield LinearErrors(pattern, len(group), mean, worst.relative, worst.name)
