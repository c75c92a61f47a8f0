"""Which decoder layers keep what between forward and backward, for so many bytes; free of torch.

Levels and their order are those of `levels.py`. From all layers computed again, steps raise one
layer by one level: the experts of all layers first, from the last layer to the first, then their
attention, their projections, and the rest, in the same order. What saves most time a byte comes
first, and a choice is a number of steps, so that more memory never keeps less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from ..layout import human_bytes
from .budget import Activity

RECOMPUTE, EXPERTS, ATTENTION, PROJECTIONS, KEEP = LEVELS = (
    "recompute",
    "experts",
    "attention",
    "projections",
    "keep",
)
"""Each keeps what those before it keep."""

ALL_KEPT = "all kept"
"""Entry of `ActivitiesByLevel` that may be there for a step in which every layer keeps all: then
no layer holds for others what they share, such as masks."""

_VALUES = {EXPERTS: 8.0, ATTENTION: 7.0, PROJECTIONS: 3.0, KEEP: 1.0}
"""Microseconds that a MB kept saves, by the level that keeps it (Qwen3-30B-A3B, one H200)."""

_RECOMPUTED = 0.26
"""The part of a step that computing all layers again takes: there, at micro-batch 4, 16,521
tokens/s computing all again, and 22,483 keeping all."""

ActivitiesByLevel = Mapping[str, Sequence[Activity]]
"""Level -> what each block does in a step in which all decoder layers are on that level."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What one decoder layer keeps."""

    name: str
    level: str  # One of `LEVELS`
    experts: str = "device"  # Where its packed experts are: "device" or "host"

    @property
    def activations(self) -> str:
        """Whether all that backward needs is kept: "keep", "part" or "recompute"."""
        return self.level if self.level in (KEEP, RECOMPUTE) else "part"


@dataclass(frozen=True, slots=True)
class Choice:
    """The most that layers can keep."""

    steps: int  # Of `order`
    levels: dict[str, str]  # Decoder layer -> its level, in the model's order
    activities: tuple[Activity, ...]  # What each block then does

    @property
    def layers(self) -> tuple[LayerChoice, ...]:
        """The same for each decoder layer, in the model's order."""
        return tuple(LayerChoice(name, level) for name, level in self.levels.items())


def order(layers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (layer, its new level) for each step, given the layers in the model's order."""
    return ((name, level) for level in LEVELS[1:] for name in reversed(layers))


def levels_at(layers: Sequence[str], steps: int) -> dict[str, str]:
    """Return the level of each layer after so many steps."""
    levels = dict.fromkeys(layers, RECOMPUTE)
    for (name, level), _ in zip(order(layers), range(steps), strict=False):
        levels[name] = level
    return levels


def mixed(activities: ActivitiesByLevel, levels: Mapping[str, str]) -> tuple[Activity, ...]:
    """Return what each block does where each layer is on its level."""
    if ALL_KEPT in activities and set(levels.values()) == {KEEP}:
        return tuple(activities[ALL_KEPT])
    by_name = {level: {a.name: a for a in activities[level]} for level in {*levels.values()}}
    return tuple(
        by_name[levels[block.name]][block.name] if block.name in levels else block
        for block in activities[RECOMPUTE]
    )


def most_kept(
    layers: Sequence[str],
    activities: ActivitiesByLevel,
    fits: Callable[[Choice], bool],
    highest: str = KEEP,
) -> Choice | None:
    """Return the choice of the most steps that fits, up to a level; None where none does."""
    for steps in range(LEVELS.index(highest) * len(layers), -1, -1):
        levels = levels_at(layers, steps)
        choice = Choice(steps, levels, mixed(activities, levels))
        if fits(choice):
            return choice
    return None


def choose(
    layers: Sequence[str],
    activities: ActivitiesByLevel,
    needed: Callable[[tuple[Activity, ...]], int],
    limit: int,
    highest: str = KEEP,
) -> Choice:
    """Return the choice of the most steps, up to a level, that needs no more than `limit` bytes.

    Raises:
        ConfigError: Every choice needs more.
    """
    least: list[int] = []

    def fits(choice: Choice) -> bool:
        least[:] = [min((*least, needs := needed(choice.activities)))]
        return needs <= limit

    choice = most_kept(layers, activities, fits, highest)
    if choice is None:
        raise ConfigError(
            f"memory is {limit} bytes ({human_bytes(limit)}), and a step that computes layers "
            f"again takes {human_bytes(least[0])}: {least[0] - limit} bytes are missing. Take a "
            "smaller batch_size or seq_len, or give more memory."
        )
    return choice


def gain(activities: ActivitiesByLevel, levels: Mapping[str, str]) -> float:
    """Return how many times as fast a step is as one that computes every layer again."""
    every = _value(activities, dict.fromkeys(levels, KEEP))
    kept = _value(activities, levels) / every if every else 0.0
    return 1 / (1 - _RECOMPUTED * kept)


def _value(activities: ActivitiesByLevel, levels: Mapping[str, str]) -> float:
    """Return what is saved in time by what layers keep on these levels."""
    saved = {level: {a.name: a.saved for a in blocks} for level, blocks in activities.items()}
    total = 0.0
    for name, level in levels.items():
        for below, this in pairwise(LEVELS[: LEVELS.index(level) + 1]):
            total += _VALUES[this] * max(saved[this][name] - saved[below][name], 0)
    return total


def counted(layers: Iterable[LayerChoice]) -> dict[str, int]:
    """Return how many layers there are of each kind: keep, part, recompute; and host, of all."""
    layers = tuple(layers)
    kinds = Counter(layer.activations for layer in layers)
    host = sum(layer.experts == "host" for layer in layers)
    return {kind: kinds[kind] for kind in (KEEP, "part", RECOMPUTE)} | {"host": host}


def sentence(counts: Mapping[str, int], needed: int, memory: int, times: float) -> str:
    """Say what is kept, what it takes of the memory, and what it gains; without a full stop."""
    every = sum(counts[kind] for kind in (KEEP, "part", RECOMPUTE))
    said = [f"{counts[KEEP]} of {every} layers keep their activations"]
    if counts["part"]:
        said.append(f"{counts['part']} keep part of them")
    if needed < 1 << 28:
        of = f"{human_bytes(needed)} of {human_bytes(memory)}"
    else:
        of = f"{needed / 2**30:.1f} of {memory / 2**30:.4g} GiB"
    gains = f", about {times:.2f} times as fast as computing all again" if times > 1.005 else ""
    return f"{', '.join(said)}: {of}{gains}"
