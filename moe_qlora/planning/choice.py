"""Which decoder layers keep what between forward and backward, for so many bytes; free of torch.

Levels are those of `levels.py`. From all layers computed again, steps raise one layer by one level:
all layers to the one that keeps a part, from the last layer to the first, then all to the one that
keeps all. What saves more time a byte comes first, and a choice is a number of steps, so that more
memory never keeps less.

Where packed experts may lie in host memory (`hosting.py`), a byte of the device may also hold
those of a layer, which saves their copies as far as computing does not hide them. Then a choice is
a place on one path, from all of them in host memory and all computed again to none and all kept:
each step of it is what saves more time a byte. The path knows nothing of the memory, so that what a
larger memory computes again or copies, a smaller one does too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout import human_bytes
from .budget import Activity
from .hosting import RECOMPUTED, Hosting

RECOMPUTE, PART, ATTENTION, KEEP = LEVELS = ("recompute", "part", "attention", "keep")
"""A model's layers are on three of these: on "attention" in place of "part" in long sequences."""

_EXPERTS, _ATTENTION, _REST = (0.59, 8.0), (0.18, 7.0), (0.23, 2.4)
"""The part of a layer's recomputation that keeping each saves, and the microseconds that a MB of it
saves (Qwen3-30B-A3B, one H200)."""

_MEASURED = 4096
"""Tokens of the sequences for which these were measured."""

_LONG = 3 * _MEASURED
"""Tokens from where attention alone is kept: the experts beside it take four times its bytes, for
as much time again."""

MORE_MEMORY = "Take a smaller batch_size or seq_len, or give more memory."
"""What to do where nothing fits."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels in the order in which layers keep more, and what each saves."""

    levels: tuple[str, str, str]
    values: Mapping[str, float]  # Microseconds that a MB saves which a level keeps
    saved: Mapping[str, float]  # The part of a layer's recomputation that a level saves

    @classmethod
    def of(cls, seq: int) -> Ladder:
        """Return the levels for sequences of so many tokens.

        What attention saves grows with these, and what it keeps does not.
        """
        sizes = [saved / value for saved, value in (_ATTENTION, _EXPERTS, _REST)]
        times = [_ATTENTION[0] * seq / _MEASURED, _EXPERTS[0], _REST[0]]
        part, kept = (ATTENTION, 1) if seq > _LONG else (PART, 2)
        values = {part: sum(times[:kept]) / sum(sizes[:kept])}
        values[KEEP] = sum(times[kept:]) / sum(sizes[kept:])
        saved = {RECOMPUTE: 0.0, part: sum(times[:kept]) / sum(times), KEEP: 1.0}
        return cls((RECOMPUTE, part, KEEP), values, saved)


ActivitiesByLevel = Mapping[str, Sequence[Activity]]
"""Level -> what each block does in a step in which all decoder layers are on that level."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What one decoder layer keeps."""

    name: str
    activations: str  # "keep", "part" or "recompute"
    experts: str = "device"  # Where its packed experts are: "device" or "host"


@dataclass(frozen=True, slots=True)
class Choice:
    """What layers keep at one place of the path."""

    levels: dict[str, str]  # Decoder layer -> its level, in the model's order
    activities: tuple[Activity, ...]  # What each block then does
    host: int = 0  # Layers with experts in host memory, the last of those that have experts

    def layers(self, hosting: Hosting | None = None) -> tuple[LayerChoice, ...]:
        """Return the same for each decoder layer, in the model's order."""
        hosted = {layer.name for layer in hosting.hosted(self.host)} if hosting else ()
        return tuple(
            LayerChoice(
                name,
                level if level in (RECOMPUTE, KEEP) else PART,
                "host" if name in hosted else "device",
            )
            for name, level in self.levels.items()
        )


@dataclass(frozen=True)
class Choices:
    """All choices that there are for a model, from the one that takes the least memory on."""

    layers: tuple[str, ...]  # Names of the decoder layers, in the model's order
    ladder: Ladder
    hosting: Hosting | None = None  # Where packed experts may lie in host memory

    @cached_property
    def path(self) -> tuple[tuple[int, int], ...]:
        """The places that a choice may be at, from the least memory to the most.

        Each is a number of layers with experts in host memory, and of steps up.
        """
        counts = [0] if self.hosting is None else [*self.hosting.counts]
        places, most = [(counts.pop(0), 0)], 2 * len(self.layers)
        while counts or places[-1][1] < most:
            host, steps = places[-1]
            if counts and (steps == most or self._saves(host, counts[0], steps)):
                places.append((counts.pop(0), steps))
            else:
                places.append((host, steps + 1))
        return tuple(places)

    def _saves(self, host: int, fewer: int, steps: int) -> bool:
        """Whether a byte saves more time with experts of `host - fewer` layers than by a step."""
        assert self.hosting is not None
        saved = {name: self.ladder.saved[level] for name, level in self.levels_at(steps).items()}
        seconds = self.hosting.waiting(host, saved) - self.hosting.waiting(fewer, saved)
        level = self.ladder.levels[1 if steps < len(self.layers) else 2]
        each = self.ladder.values[level] * 1e-12 / self.hosting.pace.against_measured
        return seconds > each * (self.hosting.freed(host) - self.hosting.freed(fewer))

    def levels_at(self, steps: int) -> dict[str, str]:
        """Return the level of each layer after so many steps."""
        every, levels = len(self.layers), self.ladder.levels
        return {
            name: levels[(steps >= every - place) + (steps >= 2 * every - place)]
            for place, name in enumerate(self.layers)
        }

    def at(self, place: tuple[int, int], activities: ActivitiesByLevel) -> Choice:
        """Return the choice of a place; only levels that layers are on there need be known."""
        host, steps = place
        levels = self.levels_at(steps)
        known = {level: {a.name: a for a in activities[level]} for level in {*levels.values()}}
        blocks = [
            known[levels[block.name]][block.name] if block.name in levels else block
            for block in activities[RECOMPUTE]
        ]
        return Choice(levels, tuple(blocks), host)

    def most_kept(
        self, activities: ActivitiesByLevel, fits: Callable[[Choice], bool]
    ) -> Choice | None:
        """Return the last choice on the path that fits, if any does."""
        choices = (self.at(place, activities) for place in reversed(self.path))
        return next(filter(fits, choices), None)

    def gain(self, choice: Choice) -> float:
        """Return how many times as fast a step is as one that computes every layer again.

        With `hosting`, that one also has as many experts in host memory as there may be.
        """
        saved = self.saved_by(choice)
        if self.hosting is not None:
            most, step = self.hosting.most, self.hosting.step
            return step(most, {}) / step(choice.host, saved)
        return 1 / (1 - RECOMPUTED * sum(saved.values()) / len(saved))

    def saved_by(self, choice: Choice) -> dict[str, float]:
        """Return the part of each layer's recomputation that its level saves."""
        return {name: self.ladder.saved[level] for name, level in choice.levels.items()}


def counted(layers: Iterable[LayerChoice]) -> dict[str, int]:
    """Return how many layers there are of each kind: keep, part, recompute; and host, of all."""
    layers = tuple(layers)
    kinds = Counter(layer.activations for layer in layers)
    host = sum(layer.experts == "host" for layer in layers)
    return {kind: kinds[kind] for kind in (KEEP, PART, RECOMPUTE)} | {"host": host}


def sentence(
    counts: Mapping[str, int],
    needed: int,
    memory: int,
    times: float,
    hosting: Hosting | None = None,
    saved: Mapping[str, float] | None = None,
) -> str:
    """Say what is kept, what it takes of the memory, and what it gains; without a full stop.

    With `hosting`, also what lies in host memory; layers need not compute what is `saved` again.
    """
    every, host = sum(counts[kind] for kind in (KEEP, PART, RECOMPUTE)), counts["host"]
    said = [f"{counts[KEEP]} of {every} layers keep their activations"]
    if counts[PART]:
        said.append(f"{counts[PART]} keep part of them")
    if hosting is not None and host:
        size = human_bytes(hosting.host_nbytes(host))
        said.append(f"experts of {host} lie in {size} of host memory")
    if needed < 1 << 28:
        of = f"{human_bytes(needed)} of {human_bytes(memory)}"
    else:
        of = f"{needed / 2**30:.1f} of {memory / 2**30:.4g} GiB"
    than = " and copying all experts" if hosting is not None else ""
    gains = f", about {times:.2f} times as fast as computing all again{than}"
    copies = hosting.sentence(host, saved or {}) if hosting is not None and host else ""
    return f"{', '.join(said)}: {of}{gains if times > 1.005 else ''}{copies}"
