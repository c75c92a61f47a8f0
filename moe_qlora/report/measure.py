"""Measure the pieces of a report: layout, bytes, a rehearsed step, error, LoRA and curves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn

from ..checkpoint.adapter import Resolver, check_adapter_patterns, open_adapter
from ..checkpoint.manifest import is_packed
from ..checkpoint.training_codec import chosen_experts
from ..checkpoint.verify import WeightError, verify
from ..errors import CheckpointError
from ..layout import ExpertParam, ModelLayout, name_pattern, unwrapped, unwrapped_name
from ..lora.config import top_k_of
from ..memory.budget import Settings
from ..memory.rehearsal import Inventory, rehearse
from ..models.files import MAX_JSON, read_json
from ..progress import Progress
from .pieces import (
    Curve,
    ErrorMap,
    ErrorPiece,
    LayoutPiece,
    LinearErrors,
    LoraGroup,
    LoraPiece,
    MemoryPiece,
    Missing,
    TrainingPiece,
    WeightGroup,
)

_FIRST = ("loss", "eval_loss", "learning_rate", "grad_norm")
_NO_CURVES = re.compile(
    r"step|epoch|total_flos|train_.*|num_.*tokens.*|.*_runtime|.*_per_second|.*_time",
    re.DOTALL,  # no name backtracks
)
_LARGEST = 1e15
_MOST = 16
"""Most curves of a page; TRL's trainers log dozens."""


def describe(inventory: Inventory) -> LayoutPiece:
    """Return the layout of a model, from its inventory."""
    layout, config = inventory.layout, inventory.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return LayoutPiece(
        model_type=str(getattr(config, "model_type", "") or ""),
        packed=inventory.packed,
        groups=tuple(_weight_groups(layout)),
        layers=len(layout.modules),
        experts=tuple(sorted({module.num_experts for module in layout.modules})),
        top_k=top_k_of(config) or top_k_of(text),
        routers=_patterns(router.name for router in layout.routers),
        linear_experts=_patterns(item.name for item in layout.linear_experts),
        rejected=len(layout.rejected),
        kinds=inventory.kinds,
    )


def _weight_groups(layout: ModelLayout) -> Iterable[WeightGroup]:
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
    """Rehearse a training step with this LoRA; None for LoRA on attention and experts."""
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
    """Group errors of expert weights: the layers and their rows of experts' errors, by pattern.

    The pattern includes the number of experts.
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
    """Return the numbers in a full name, a label of its layer: "3" for `layers.3.mlp`."""
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


@dataclass(frozen=True, slots=True)
class _Adapted:
    rank: int
    trained: int  # Weights of both factors, and of a bias
    chosen: int = 0  # Experts that have it, 0 where all do


def of_folder(folder: Path, model: nn.Module, layout: ModelLayout, total: int) -> LoraPiece:
    """Return which weights of a meta model the adapter in a folder covers.

    Errors are those of `merge_adapter`: a damaged adapter, another kind, another model.
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
            if first.bias or first.tokens:
                others += trained
                continue
            rank = file.info(first.a).shape[0] // max(first.experts, 1)
            some = len(chosen.get(name, ()))
            if some:  # the file has zeros for other experts
                trained = trained * some // first.experts
            adapted[name] = _Adapted(rank, trained, some)
        others += sum(prod(file.info(key).shape) for key in updates.replacements.values())
    return LoraPiece(str(folder), _lora_groups(model, layout, adapted), others, total)


def active_adapters(model: Any) -> list[str]:
    """Return the names of a model's active adapters, added by PEFT or by transformers."""
    active = getattr(model, "active_adapters", ()) if getattr(model, "peft_config", None) else ()
    return list(active() if callable(active) else active)


def of_live(model: Any, layout: ModelLayout, total: int) -> LoraPiece:
    """Return which weights the active adapters of a model in memory cover."""
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
    groups = _lora_groups(base, layout, adapted)
    return LoraPiece(", ".join(names), groups, max(trained - counted, 0), total)


def _lora_groups(
    model: nn.Module, layout: ModelLayout, adapted: Mapping[str, _Adapted]
) -> tuple[LoraGroup, ...]:
    """Group expert weights, Linear layers and other weights with LoRA by pattern."""
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


def read_log(file: Path | None) -> TrainingPiece | Missing:
    """Read the log of a run; without a file the piece is `Missing`."""
    if file is None:
        return Missing(
            "There is no log of a training run: name the folder that Trainer wrote, with its "
            "trainer_state.json or checkpoints."
        )
    state = read_json(file, MAX_JSON)
    history = state.get("log_history")
    if not isinstance(history, list):
        raise CheckpointError(f"{file} has no log_history: it is no state of a Trainer.")
    logged = _values([entry for entry in history if isinstance(entry, dict)])
    names = sorted(logged, key=lambda name: (_FIRST.index(name) if name in _FIRST else 9, name))
    if not names:
        return Missing("The run logged no loss: set logging_steps in its TrainingArguments.")
    batch = state.get("train_batch_size")
    steps, most, epochs = (_number(state.get(n)) for n in ("global_step", "max_steps", "epoch"))
    return TrainingPiece(
        str(file),
        int(steps or 0),
        int(most or 0),
        epochs or 0.0,
        batch if isinstance(batch, int) and _is_number(batch) and batch > 0 else None,
        tuple(_curve(name, logged[name]) for name in names[:_MOST]),
        _tokens(state, history),
    )


def _tokens(state: dict[str, Any], history: list[Any]) -> float | None:
    """Return how many tokens the run saw, by Trainer's own count or TRL's log."""
    counts = [state.get("num_input_tokens_seen")]
    counts += [entry.get("num_tokens") for entry in history if isinstance(entry, dict)]
    return max((number for count in counts if (number := _number(count) or 0) > 0), default=None)


def _values(entries: list[dict[str, Any]]) -> dict[str, dict[float, float | None]]:
    """Return logged values by name and step; the last one of a step counts."""
    logged: dict[str, dict[float, float | None]] = {}
    for entry in entries:
        step = _number(entry.get("step"))
        if step is not None:
            for name, value in entry.items():
                if _is_number(value) and not _NO_CURVES.fullmatch(name):
                    logged.setdefault(name, {})[step] = _number(value)
    return logged


def _curve(name: str, values: dict[float, float | None]) -> Curve:
    steps = sorted(values)
    points = tuple((step, value) for step in steps if (value := values[step]) is not None)
    lost = tuple(step for step in steps if values[step] is None)
    return Curve(name, points, lost)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """Return a number of a log; None if it is missing, not finite or too large."""
    return float(value) if _is_number(value) and abs(value) <= _LARGEST else None
