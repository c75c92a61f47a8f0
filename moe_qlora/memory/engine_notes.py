"""What to know about a plan for many GPUs, a sentence each, and which engine makes it fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from ..errors import MoeQloraError
from ..layout import human_bytes
from .budget import Engine
from .devices import CONTEXT_BYTES, exact_size
from .engines import ENGINES
from .planner import Planner
from .report import Hint, MemoryPlan

MOST_RANKS = 1024


def notes_of(planner: Planner, devices: int) -> Iterator[str]:
    """Yield what the figures of a plan for several devices rest on."""
    engine = planner.settings.engine
    if engine is None:
        if devices > 1:
            yield (
                f"The layers are spread over the {devices} GPUs in one process (device_map), and "
                "compute one after the other; DDP needs the whole model on each GPU, and fsdp, ep "
                "and zero3 a share of it."
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
        uses = other.uses(planner.settings.batch, planner.settings.seq, sizes)
    except MoeQloraError:
        return None  # Experts that expert parallelism cannot reach
    loads = other.load_peak + CONTEXT_BYTES
    if all(use.fits and loads <= use.capacity for use in uses):
        return max(use.needed for use in uses)
    return None


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
