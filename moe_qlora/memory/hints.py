"""What to change where a plan does not fit its devices, and what each change saves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .budget import Settings
from .devices import exact_size
from .planner import Planner
from .report import Hint, MemoryPlan
from .source import bnb_config

_DEVICES = 16  # the most that are tried
_CHUNK = 1024  # tokens of a loss that is computed in chunks


@dataclass(frozen=True)
class _Change:
    """One change to try."""

    what: str  # In words
    setting: str  # For `plan` and the command line
    fields: dict[str, Any]  # Of `Settings`
    packing: Callable[[Any], Any] | None = None  # Changes the quantization config
    loss_part: float = 1.0  # The part of the loss's tensors that is there at once


def hints_of(planner: Planner, report: MemoryPlan, capacities: Sequence[int]) -> Iterator[Hint]:
    """Yield changes that save something, those that cost least first.

    Each change is tried by itself. Where none of them is enough, the first few are tried together;
    more devices come last.
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
    yield from _more_devices(planner, report, capacities)


def _try(
    planner: Planner, report: MemoryPlan, capacities: Sequence[int], changes: Sequence[_Change]
) -> tuple[int, bool]:
    """Return the bytes that these changes save at the peak, and whether it then fits."""
    other, loss_part = _changed(planner, changes)
    batch, seq = other.settings.batch, other.settings.seq
    saves = report.peak.nbytes - other.peak(batch, seq, loss_part).nbytes
    return saves, all(use.fits for use in other.uses(batch, seq, capacities, loss_part))


def _changed(planner: Planner, changes: Sequence[_Change]) -> tuple[Planner, float]:
    """Return a planner with these changes, and the part of the loss that is there at once."""
    source, settings, loss_part = planner.source, planner.settings, 1.0
    for change in changes:
        settings = replace(settings, **change.fields)
        if change.packing is not None:
            source = replace(source, quantization=change.packing(source.quantization))
        loss_part = min(loss_part, change.loss_part)
    if source is planner.source and settings == planner.settings:
        return planner, loss_part
    # The user's LoraConfig replaces rank and targets until a change names others.
    lora_config = planner.lora_config if settings.targets == planner.settings.targets else None
    return Planner(source, settings, lora_config), loss_part


def _more_devices(
    planner: Planner, report: MemoryPlan, capacities: Sequence[int]
) -> Iterable[Hint]:
    size, fullest = max(capacities), max(use.needed for use in report.devices)
    for count in range(len(capacities) + 1, _DEVICES + 1):
        uses = planner.uses(planner.settings.batch, planner.settings.seq, [size] * count)
        if all(use.fits for use in uses):
            saves = fullest - max(use.needed for use in uses)
            what = f"spread it over {count} devices like the largest"
            yield Hint(what, f"gpus='{count}x{exact_size(size)}'", saves, True)
            return


def _changes(planner: Planner, report: MemoryPlan) -> Iterable[_Change]:
    settings, source = planner.settings, planner.source
    if not settings.checkpointing:
        yield _training_change("compute layers again in backward", checkpointing=True)
    if source.free and report.kind in ("nf4", "fp4") and not report.double_quant:
        setting = "bnb_4bit_use_double_quant=True"
        yield _Change("quantize the statistics too", setting, {}, _with_double_quant)
    if source.free and report.kind == "int8":
        yield _Change("pack to 4 bit", "load_in_4bit=True", {}, lambda asked: bnb_config(None))
    tokens = settings.batch * settings.seq
    if tokens > _CHUNK:
        what = f"compute the loss {_CHUNK} tokens at a time"
        yield _Change(what, "use_liger_kernel=True (Trainer)", {}, loss_part=_CHUNK / tokens)
    yield from _smaller_training(settings, report, planner.lora_config is None)


def _with_double_quant(config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed.bnb_4bit_use_double_quant = True
    return changed


def _smaller_training(settings: Settings, report: MemoryPlan, free: bool) -> Iterable[_Change]:
    """Yield changes of the training settings; `free`: no `LoraConfig` fixes rank and targets."""
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
    if free and settings.rank > 8:
        yield _training_change("half the rank", rank=settings.rank // 2)
    if free and settings.targets != "attention":
        yield _training_change("LoRA on attention alone", targets="attention")


def _training_change(what: str, **fields: Any) -> _Change:
    return _Change(what, ", ".join(f"{name}={value!r}" for name, value in fields.items()), fields)
