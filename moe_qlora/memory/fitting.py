"""How much the decoder layers of a planned model can keep on its devices: the `fit` of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .budget import DeviceUse
from .choice import KEEP, LEVELS, RECOMPUTE, Choice, gain, levels_at, most_kept
from .devices import reserve_nbytes
from .planner import LevelError, Planner
from .report import PlannedFit


def fit_of(planner: Planner, uses: Sequence[DeviceUse]) -> PlannedFit | None:
    """Return what layers can keep on devices with these blocks.

    None where the model has no decoder layers, and, with a note of the planner's, where these do
    not run on a level.
    """
    try:
        return _fit_of(planner, uses)
    except LevelError as error:
        planner.notes.append(f"What layers can keep of their activations is not known ({error}).")
        return None


def _fit_of(planner: Planner, uses: Sequence[DeviceUse]) -> PlannedFit | None:
    # Blocks stay on their devices. Whether the settings have gradient checkpointing does not
    # matter, since this is in its place.
    batch, seq = planner.settings.batch, planner.settings.seq
    capacities = [use.capacity for use in uses]
    blocks, workspace = planner.activities(batch, seq, capacities, level=RECOMPUTE)
    activities = {RECOMPUTE: blocks}
    layers = [block.name for block in blocks if planner.rank_blocks[block.name].layer]
    if not layers:
        return None
    settings = replace(planner.settings, checkpointing=True)

    def fullest(choice: Choice) -> tuple[int, DeviceUse]:
        kept = [name for name, level in choice.levels.items() if level == KEEP]
        budget = planner.budget_of(choice.activities, replace(settings, workspace=workspace), kept)
        peaks = zip(budget.peaks_on(uses), uses, strict=True)
        return max(peaks, key=lambda pair: _needed(pair[0]) / pair[1].capacity)

    def fits(choice: Choice) -> bool:
        peak, use = fullest(choice)
        return _needed(peak) <= use.capacity

    none = Choice(0, levels_at(layers, 0), blocks)
    choice = none
    if fits(none):
        for level in LEVELS[1:]:
            activities[level], more = planner.activities(batch, seq, capacities, level=level)
            workspace = max(workspace, more)
        choice = most_kept(layers, activities, fits) or none
    peak, use = fullest(choice)
    times = gain(activities, choice.levels) if choice.steps else 1.0
    return PlannedFit(choice.layers(), peak, _needed(peak), use.capacity, times)


def _needed(peak: int) -> int:
    return peak + reserve_nbytes(peak) if peak else 0
