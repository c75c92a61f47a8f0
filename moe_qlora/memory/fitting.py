"""How much the decoder layers of a planned model can keep on its devices: the `fit` of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .attention import attended
from .budget import DeviceUse
from .choice import RECOMPUTE, Choice, Choices, Ladder
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
    hosting = planner.hosting(blocks) if settings.offload else None

    def fullest(choice: Choice) -> tuple[int, DeviceUse]:
        """Return the peak of the fullest device, which the planner has no experts on."""
        budget = planner.budget_of(choice.activities, replace(settings, workspace=workspace))
        brought = 0
        if hosting is not None:
            brought = hosting.freed(hosting.most) - hosting.freed(choice.host)
        peaks = zip((peak + brought for peak in budget.peaks_on(uses)), uses, strict=True)
        return max(peaks, key=lambda pair: _needed(pair[0]) / pair[1].capacity)

    def fits(choice: Choice) -> bool:
        peak, use = fullest(choice)
        return _needed(peak) <= use.capacity

    ladder = Ladder.of(attended(planner.text_config, seq))
    choices = Choices(tuple(layers), ladder, hosting)
    none = choices.at(choices.path[0], activities)
    choice = none
    if fits(none):
        for level in ladder.levels[1:]:
            activities[level], more = planner.activities(batch, seq, capacities, level=level)
            workspace = max(workspace, more)
        choice = choices.most_kept(activities, fits) or none
    peak, use = fullest(choice)
    times = 1.0 if choice is none else choices.gain(activities, choice)
    return PlannedFit(
        choice.layers(hosting),
        peak,
        _needed(peak),
        use.capacity,
        times,
        hosting,
        choices.saved_by(choice),
    )


def _needed(peak: int) -> int:
    return peak + reserve_nbytes(peak) if peak else 0
