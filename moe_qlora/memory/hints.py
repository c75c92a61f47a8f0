"""What to change where a plan does not fit its devices, and what each change saves."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .attention import FLEX
from .devices import exact_size
from .engine_notes import engine_hints
from .planner import Planner
from .report import Hint, MemoryPlan
from .source import bnb_config

_DEVICES = 16  # the most that are tried
# Settings that change neither the model nor what a step of given sizes does.
_SAME_STEPS = {"optimizer", "accumulation", "batch", "seq"}
_CHUNK = 1024  # tokens of a loss that is computed in chunks


@dataclass(frozen=True)
class _Change:
    """One change to try."""

    what: str  # In words
    setting: str  # For `plan` and the command line
    fields: dict[str, Any]  # Of `Settings`
    quantization: Any = None  # Another quantization config
    loss_part: float = 1.0  # The part of the loss's tensors that is there at once


def hints_of(planner: Planner, report: MemoryPlan, capacities: Sequence[int]) -> Iterator[Hint]:
    """Yield changes that save something, those that cost least first, and more devices last.

    Each change is tried by itself; where none of them is enough, the first few together.
    """
    least = report.peak.nbytes // 200
    useful: list[_Change] = []
    enough = False
    for change in _changes(planner, report):
        saves, fits = _try(planner, report, capacities, [change])
        if saves >= least:
            useful.append(change)
            enough = enough or fits
            yield Hint(change.what, change.setting, saves, fits)
    for count in range(2, len(useful) + 1) if not enough else ():
        saves, fits = _try(planner, report, capacities, useful[:count])
        if fits:
            # Of two changes of one setting the later one holds.
            settings = {c.setting.partition("=")[0]: c.setting for c in useful[:count]}
            yield Hint(f"the first {count} together", ", ".join(settings.values()), saves, fits)
            break
    if len(capacities) > 1 or planner.settings.engine:
        yield from engine_hints(planner, report, capacities)
    if planner.settings.engine:
        return  # Its ranks are not spread over devices
    size, fullest = max(capacities), max(use.needed for use in report.devices)
    for count in range(len(capacities) + 1, _DEVICES + 1):
        uses = planner.uses(planner.settings.batch, planner.settings.seq, [size] * count)
        if all(use.fits for use in uses):
            saves = fullest - max(use.needed for use in uses)
            what = f"spread it over {count} devices like the largest"
            yield Hint(what, f"gpus='{count}x{exact_size(size)}'", saves, True)
            break


def _try(
    planner: Planner, report: MemoryPlan, capacities: Sequence[int], changes: Sequence[_Change]
) -> tuple[int, bool]:
    """Return the bytes that these changes save at the peak, and whether it then fits."""
    source, settings, loss_part = planner.source, planner.settings, 1.0
    for change in changes:
        settings = replace(settings, **change.fields)
        if change.quantization is not None:
            source = replace(source, quantization=change.quantization)
        loss_part = min(loss_part, change.loss_part)
    if source is planner.source and {f for c in changes for f in c.fields} <= _SAME_STEPS:
        other = planner.with_settings(settings)
    else:
        # The user's LoraConfig replaces rank and targets until a change names others.
        same = settings.targets == planner.settings.targets
        other = Planner(source, settings, planner.lora_config if same else None)
    saves = report.peak.nbytes - other.peak(settings.batch, settings.seq, loss_part).nbytes
    uses = other.uses(settings.batch, settings.seq, capacities, loss_part)
    return saves, all(use.fits for use in uses)


def _changes(planner: Planner, report: MemoryPlan) -> Iterable[_Change]:
    settings, source = planner.settings, planner.source
    if planner.eager is not None and planner.eager.flex:
        yield _training_change("compute attention without holding its scores", attention=FLEX)
    if not settings.checkpointing:
        yield _training_change("compute layers again in backward", checkpointing=True)
    if source.free and report.kind in ("nf4", "fp4") and not report.double_quant:
        setting = "bnb_4bit_use_double_quant=True"
        double = copy.deepcopy(source.quantization)
        double.bnb_4bit_use_double_quant = True
        yield _Change("quantize the statistics too", setting, {}, double)
    if source.free and report.kind == "int8":
        yield _Change("pack to 4 bit", "load_in_4bit=True", {}, bnb_config(None))
    tokens = settings.batch * settings.seq
    if tokens > _CHUNK and not settings.liger:
        what = f"compute the loss {_CHUNK} tokens at a time, where Liger knows the model"
        yield _Change(what, "use_liger_kernel=True (Trainer)", {}, loss_part=_CHUNK / tokens)
    if settings.optimizer == "adamw":
        yield _training_change("keep the optimizer's moments in 8 bit", optimizer="adamw_8bit")
    if not settings.optimizer.startswith("paged"):
        yield _training_change("and in pages", optimizer="paged_adamw_8bit")
    if settings.adapter_dtype == "float32":
        yield _training_change("train adapters in bfloat16", adapter_dtype="bfloat16")
    if settings.batch > 1:
        accumulation = settings.accumulation * settings.batch
        yield _training_change("one sequence at a time", batch=1, accumulation=accumulation)
    shorter = report.largest_seq or settings.seq // 2
    if 0 < shorter < settings.seq:
        yield _training_change("shorter sequences", seq=shorter)
    free = planner.lora_config is None  # which would fix rank and targets
    if free and settings.rank > 8:
        yield _training_change("half the rank", rank=settings.rank // 2)
    if free and settings.targets != "attention":
        yield _training_change("LoRA on attention alone", targets="attention")


def _training_change(what: str, **fields: Any) -> _Change:
    return _Change(what, ", ".join(f"{name}={value!r}" for name, value in fields.items()), fields)
