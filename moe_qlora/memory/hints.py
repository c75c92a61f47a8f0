"""Proposes changes for a plan that does not fit, with the bytes that each saves, and engines."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from ..errors import MoeQloraError
from ..layout import human_bytes
from ..packing.codecs import codec_of
from .attention import FLEX
from .budget import Engine
from .devices import exact_size
from .engines import ENGINES
from .planner import Planner
from .report import Hint, MemoryPlan
from .source import bnb_config

_DEVICES = 16  # the most that are tried
# Settings that change neither the model nor what a step of given sizes does.
_SAME_STEPS = {"optimizer", "accumulation", "batch", "seq", "offload"}
_CHUNK = 1024  # tokens of a loss that is computed in chunks
MOST_RANKS = 1024


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
            # The later of two changes of one setting applies.
            settings = {c.setting.partition("=")[0]: c.setting for c in useful[:count]}
            yield Hint(f"the first {count} together", ", ".join(settings.values()), saves, fits)
            break
    if planner.settings.offload:
        return  # Which is for one device
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
        lora = planner.lora_config if same else None
        other = Planner(source, settings, lora, planner.card, planner.pace)
    peak = other.peak(settings.batch, settings.seq, capacities, loss_part)
    saves = report.peak.nbytes - peak.nbytes
    uses = other.uses(settings.batch, settings.seq, capacities, loss_part)
    return saves, all(use.fits for use in uses)


def _changes(planner: Planner, report: MemoryPlan) -> Iterable[_Change]:
    settings, source = planner.settings, planner.source
    if planner.eager is not None and planner.eager.flex:
        yield _training_change("compute attention without holding its scores", attention=FLEX)
    if not settings.checkpointing:
        yield _training_change("compute layers again in backward", checkpointing=True)
    codec = None if report.kind is None else codec_of(report.kind)
    if source.free and codec and codec.nests and not report.double_quant:
        setting = "bnb_4bit_use_double_quant=True"
        double = copy.deepcopy(source.quantization)
        double.bnb_4bit_use_double_quant = True
        yield _Change("quantize the statistics too", setting, {}, double)
    if source.free and codec and codec.loads_in_8bit:
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
    engine, several = settings.engine, len(report.devices) > 1
    if not settings.offload and (engine.name == "ddp" if engine else not several):
        yield _training_change("keep packed experts in host memory", offload=True)
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


def notes_of(planner: Planner, devices: int) -> Iterator[str]:
    """Yield what the figures of a plan for several devices rest on."""
    engine = planner.settings.engine
    if engine is None:
        if devices > 1:
            yield (
                f"The layers are spread over the {devices} GPUs in one process (device_map), and "
                "compute one after the other."
            )
        return
    groups = devices // engine.ranks
    if groups > 1:
        yield f"{groups} groups of {engine.ranks} ranks; each group holds the whole model."
    packed = planner.meta.kind is not None
    if engine.name == "fsdp" and planner.loads_whole:
        yield "Each rank loads the whole packed model before it is sharded."
    elif engine.name == "fsdp" and packed:
        whole = planner.with_engine(None).load_peak
        yield (
            f"{human_bytes(planner.load_peak)} while loading is for moe_qlora.load_sharded; where "
            "a model is loaded first and sharded then, as under accelerate's FSDP plugin, each "
            f"rank loads the whole packed model, {human_bytes(whole)}."
        )
    if engine.name == "ep":
        yield (
            "Every rank is taken to get as many tokens for its experts as it sends, and to load "
            f"with DistributedConfig(fsdp_size={engine.ranks}, ep_size={engine.ranks}); an uneven "
            "router takes more on some ranks."
        )
    if engine.name == "zero3":
        if planner.loads_whole:
            yield "Each rank loads the whole packed model before DeepSpeed cuts it."
        yield (
            'Bucket sizes are those that transformers puts for "auto", the rest are DeepSpeed\'s '
            "defaults."
        )
        if not planner.settings.checkpointing:
            yield (
                "Without checkpointing, autograd keeps what ZeRO-3 gathered of weights that are "
                "not packed."
            )


def engine_hints(planner: Planner, report: MemoryPlan, capacities: Sequence[int]) -> Iterator[Hint]:
    """Yield, for each engine, the fewest ranks that fit: on these devices, or on more of them."""
    fullest = max(use.needed for use in report.devices)
    for name, title in ENGINES.items():
        counts = _counts(planner, name, len(capacities))
        needed = cache(partial(_needed, planner, name, capacities))
        ranks = _first(counts, needed)
        if ranks is None or planner.settings.engine == Engine(name, ranks):
            continue
        setting = f"{name}={ranks}"
        if ranks > len(capacities):
            setting = f"gpus='{ranks}x{exact_size(max(capacities))}', {setting}"
        saves = fullest - (needed(ranks) or 0)
        yield Hint(f"a process on each GPU, with {title}", setting, saves, True)


def _needed(planner: Planner, name: str, capacities: Sequence[int], ranks: int) -> int | None:
    """Return what the fullest of so many ranks needs, None where they do not fit.

    More ranks than there are devices get devices like the largest.
    """
    other = planner.with_engine(Engine(name, ranks))
    sizes = capacities if ranks <= len(capacities) else [max(capacities)] * ranks
    try:
        needed, fits = other.needs(planner.settings.batch, planner.settings.seq, sizes)
    except MoeQloraError:
        return None  # Experts that expert parallelism cannot reach
    return needed if fits else None


def _counts(planner: Planner, name: str, devices: int) -> list[int]:
    """Return the numbers of ranks that an engine can have, from that of the devices on."""
    if name == "ddp":
        return [devices] if devices > 1 else []  # More of them make no rank smaller
    counts = range(max(devices, 2), MOST_RANKS + 1)
    if name != "ep":
        return list(counts)
    totals = {param.num_experts for param in planner.meta.layout.experts}
    return [n for n in counts if totals and all(total % n == 0 for total in totals)]


def _first(counts: Sequence[int], needed: Callable[[int], int | None]) -> int | None:
    """Return the first count that fits, taking what follows one that fits to fit; None for none."""
    last, step = -1, 1  # places: of the last that does not fit, and how far to go from there
    while last + 1 < len(counts):
        place = min(last + step, len(counts) - 1)
        if needed(counts[place]) is not None:
            between = counts[last + 1 : place + 1]
            return between[bisect_left(between, True, key=lambda n: needed(n) is not None)]
        last, step = place, 2 * step
    return None
