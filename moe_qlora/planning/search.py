"""What fits some devices: what layers keep, the largest sizes, the best combination of settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, MoeQloraError
from .attention import FLEX
from .budget import Activity, DeviceUse, Engine, Settings
from .choice import RECOMPUTE, Choice, Choices, Ladder
from .devices import reserve_nbytes
from .planner import LIGER_LOSS, Planner, Step
from .report import Best, PlannedFit


def fit_of(planner: Planner, uses: Sequence[DeviceUse]) -> PlannedFit | None:
    """Return what layers can keep on devices with these blocks, which stay on their devices.

    None where the model has no decoder layers, or, with a note of the planner's, these cannot be
    computed again.
    """
    batch, seq = planner.settings.batch, planner.settings.seq
    capacities = [use.capacity for use in uses]
    try:
        blocks, workspace = planner.activities(batch, seq, capacities, level=RECOMPUTE)
    except ConfigError as error:
        planner.notes.append(f"What layers can keep of their activations is not known: {error}")
        return None
    activities = {RECOMPUTE: blocks}
    decoder = {block.name for block in planner.meta.blocks if block.layer}
    layers = tuple(block.name for block in blocks if block.name in decoder)
    if not layers:
        return None
    hosting = planner.hosting(blocks) if planner.settings.offload else None

    def fullest(choice: Choice) -> tuple[int, DeviceUse]:
        """Return the peak of the fullest device, which the planner has no experts on."""
        budget = planner.budget((choice.activities, workspace))
        brought = 0 if hosting is None else hosting.freed(hosting.most) - hosting.freed(choice.host)
        peaks = zip((peak + brought for peak in budget.peaks_on(uses)), uses, strict=True)
        return max(peaks, key=lambda pair: _needed(pair[0]) / pair[1].capacity)

    def fits(choice: Choice) -> bool:
        peak, use = fullest(choice)
        return _needed(peak) <= use.capacity

    choices = Choices(layers, Ladder.of(seq), hosting)
    choice = none = choices.at(choices.path[0], activities)
    if fits(none):
        for level in choices.ladder.levels[1:]:
            activities[level], more = planner.activities(batch, seq, capacities, level=level)
            workspace = max(workspace, more)
        choice = choices.most_kept(activities, fits) or none
    peak, use = fullest(choice)
    times = 1.0 if choice is none else choices.gain(choice)
    saved = choices.saved_by(choice)
    found = choice.layers(hosting), peak, _needed(peak), use.capacity
    return PlannedFit(*found, times, hosting, saved)


def _needed(peak: int) -> int:
    return peak + reserve_nbytes(peak) if peak else 0


def largest(planner: Planner, capacities: Sequence[int], name: str, grain: int, limit: int) -> int:
    """Return the largest multiple of `grain` that fits as "seq" or "batch", 0 where none does.

    A step is nearly affine in its tokens: each size that is tried is where the line through the two
    that are nearest to the last one ends, at first through no tokens, or half way where that is
    ruled out already. It is within 1/128.
    """
    settings = planner.settings

    def step(size: int) -> Step:
        batch, seq = settings.batch, size * grain
        if name == "batch":
            batch, seq = size * grain, settings.seq
        return planner.activities(batch, seq, capacities)

    def fullness(step: Step) -> float:
        uses = planner.budget(step).spread(capacities)
        return max(use.needed / use.capacity for use in uses)

    low, high = 0, limit // grain + 1
    guess = min(max(getattr(settings, name) // grain, 1), high - 1)
    tried = {0: fullness((tuple(Activity(a.name, 0, 0, 0) for a in step(guess)[0]), 0))}
    while high - low > max(1, low // 128):
        tried[guess] = fullness(step(guess))
        low, high = (guess, high) if tried[guess] <= 1 else (low, guess)
        first, second = sorted(tried, key=lambda size: abs(size - guess))[:2]
        slope = (tried[second] - tried[first]) / (second - first)
        end = first + (1 - tried[first]) / slope if slope > 0 else high
        if low and low <= end < low + 1 and tried[low] > 1 - 1 / 128:
            break
        if not low <= end < high:
            end = (low + high) / 2 if high in tried else high - 1
        guess = max(int(end), low + 1)
    return low * grain


_BOTH: dict[str, Any] = {"targets": "attention,experts"}
_SMALL: dict[str, Any] = {"adapter_dtype": "bfloat16", "optimizer": "adamw_8bit"}
_LOW_RANK = {**_SMALL, "rank": 8}

RUNGS: tuple[dict[str, Any], ...] = (
    {**_BOTH},
    {**_BOTH, **_SMALL},
    {**_BOTH, **_LOW_RANK},
    {"targets": "attention"},
    {"targets": "attention", **_LOW_RANK},
    {**_BOTH, **_LOW_RANK, "offload": True},
    {"targets": "attention", **_LOW_RANK, "offload": True},
)
"""Settings of docs/memory.md, the best first: more trained weights come before less memory, and
experts in host memory, whose copies take time, last."""

# Settings under which a planner's model and its steps are the same.
_SHARED = ("batch", "seq", "optimizer", "accumulation", "prepared", "offload", "engine")
_SHORTEST = 64  # tokens


def best_of(planner: Planner, capacities: Sequence[int], fixed: Collection[str]) -> Best | None:
    """Return the best combination of settings that fits devices of these bytes; None for none.

    Settings in `fixed` are kept. Where nothing fits with them, all but the LoRA's targets, the
    batch and the sequence may change, and at last the sequence is halved, and one at a time.
    """
    planners = {_key(planner.settings): planner}

    def tried(settings: Settings) -> Best | None:
        key = _key(settings)
        if key not in planners:
            own = (settings, planner.lora_config, planner.card, planner.pace)
            planners[key] = Planner(planner.source, *own)
        try:
            report = planners[key].with_settings(settings).report(capacities)
        except MoeQloraError:  # A target that the model does not have
            return None
        if not report.fits:
            return None
        use = max(report.devices, key=lambda use: use.needed / use.capacity)
        host = 0 if report.hosting is None else report.hosting.host_nbytes(report.hosting.most)
        return Best(settings, use.needed, use.capacity, host)

    targets = {"targets"} & set(fixed)
    if planner.lora_config is not None:
        targets |= {"targets", "rank"}
    settings = planner.settings
    for kept in (targets | set(fixed), targets):
        for settings in _candidates(planner, len(capacities), kept):
            if (found := tried(settings)) is not None:
                return found
    seq = settings.seq if settings.batch > 1 else settings.seq // 2
    while seq >= _SHORTEST:
        if (found := tried(replace(settings, batch=1, seq=seq))) is not None:
            return found
        seq //= 2
    return None


def _key(settings: Settings) -> Settings:
    return replace(settings, **{name: getattr(Settings(), name) for name in _SHARED})


def _candidates(planner: Planner, devices: int, fixed: Collection[str]) -> Iterator[Settings]:
    """Yield the settings to try, the best first; those in `fixed` are as they were asked."""
    asked = planner.settings
    base: dict[str, Any] = {"checkpointing": True, "prepared": planner.model_type in LIGER_LOSS}
    if planner.eager is not None:
        base["attention"] = FLEX
    engines = [asked.engine]
    if asked.engine is None and devices > 1:
        engines = [Engine(name, devices) for name in ("ddp", "fsdp")]
    seen: list[Settings] = []
    for rung in RUNGS:
        given = {name: value for name, value in (rung | base).items() if name not in fixed}
        if not planner.expert_layers:
            given |= {"targets": "attention"} if "targets" in given else {}
            if given.get("offload"):
                continue
        if "rank" in given:
            given["rank"] = min(given["rank"], asked.rank)
        for engine in engines:
            alone = devices == 1 if engine is None else engine.name == "ddp"
            settings = replace(asked, engine=engine, **given)
            if settings not in seen and (alone or not given.get("offload")):
                seen.append(settings)
                yield settings
