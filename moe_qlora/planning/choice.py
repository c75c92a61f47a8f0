"""Which decoder layers keep what between forward and backward, for so many bytes; free of torch.

Levels are those of `levels.py`. From all layers computed again, steps raise one layer by one level:
the experts of all layers first, from the last layer to the first, then their attention, their
narrow projections, all projections, and the rest, in the same order; in long sequences attention
first, then the experts (`Ladder`). What saves most time a byte comes first, and a choice is a
number of steps, so that more memory never keeps less.

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
from itertools import accumulate, pairwise

from ..errors import ConfigError
from ..layout import human_bytes
from .budget import Activity
from .hosting import RECOMPUTED, Hosting

RECOMPUTE, EXPERTS, ATTENTION, NARROW, PROJECTIONS, KEEP = LEVELS = (
    "recompute",
    "experts",
    "attention",
    "narrow projections",
    "projections",
    "keep",
)
"""Each keeps what those before it keep."""

ATTENTION_ALONE = "attention alone"
"""The level that comes before "attention", in place of "experts", in long sequences."""

ALL_KEPT = "all kept"
"""Entry of `ActivitiesByLevel` that may be there for a step in which every layer keeps all: then
no layer holds for others what they share, such as masks."""

_VALUES = {EXPERTS: 8.0, ATTENTION: 7.0, NARROW: 6.0, PROJECTIONS: 3.0, KEEP: 1.0}
"""Microseconds that a MB kept saves, by the level that keeps it (Qwen3-30B-A3B, one H200).

Projections by arithmetic: of a byte as many operations as features are summed over, 4,096 in
attention's output and 2,048 in q, k and v."""

_PARTS = {EXPERTS: 0.59, ATTENTION: 0.18, NARROW: 0.08, PROJECTIONS: 0.10, KEEP: 0.05}
"""The part of a layer's recomputation that each saves: there, what is kept by these values."""

_ATTENDED = 2048.0
"""Tokens that one attended to on average, where that was measured."""

MORE_MEMORY = "Take a smaller batch_size or seq_len, or give more memory."
"""What to do where nothing fits."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels in the order in which layers keep more, and what each saves."""

    levels: tuple[str, ...]  # Each keeps what those before it keep
    values: Mapping[str, float]  # Microseconds that a MB saves which a level keeps
    saved: Mapping[str, float]  # The part of a layer's recomputation that a level saves

    @classmethod
    def of(cls, attended: float) -> Ladder:
        """Return the levels for tokens that attend to so many others on average.

        What attention saves grows with these, and what it keeps does not.
        """
        times = attended / _ATTENDED
        values = {**_VALUES, ATTENTION: _VALUES[ATTENTION] * times}
        parts = {**_PARTS, ATTENTION: _PARTS[ATTENTION] * times}
        levels = LEVELS
        if values[ATTENTION] > values[EXPERTS]:
            levels = (RECOMPUTE, ATTENTION_ALONE, *LEVELS[2:])
            for each in (values, parts):
                each[ATTENTION_ALONE], each[ATTENTION] = each[ATTENTION], each.pop(EXPERTS)
        every = sum(parts.values())
        sums = accumulate((parts[level] / every for level in levels[1:]), initial=0.0)
        return cls(levels, values, dict(zip(levels, sums, strict=True)))


ActivitiesByLevel = Mapping[str, Sequence[Activity]]
"""Level -> what each block does in a step in which all decoder layers are on that level."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What one decoder layer keeps."""

    name: str
    level: str  # One of a `Ladder`
    experts: str = "device"  # Where its packed experts are: "device" or "host"

    @property
    def activations(self) -> str:
        """Whether all that backward needs is kept: "keep", "part" or "recompute"."""
        return self.level if self.level in (KEEP, RECOMPUTE) else "part"


@dataclass(frozen=True, slots=True)
class Choice:
    """The most that layers can keep."""

    steps: int  # Of `Choices.order`
    levels: dict[str, str]  # Decoder layer -> its level, in the model's order
    activities: tuple[Activity, ...]  # What each block then does
    host: int = 0  # Layers with experts in host memory, the last of those that have experts

    def layers(self, hosting: Hosting | None = None) -> tuple[LayerChoice, ...]:
        """Return the same for each decoder layer, in the model's order."""
        hosted = frozenset[str]() if hosting is None else hosting.names(self.host)
        return tuple(
            LayerChoice(name, level, "host" if name in hosted else "device")
            for name, level in self.levels.items()
        )


def mixed(activities: ActivitiesByLevel, levels: Mapping[str, str]) -> tuple[Activity, ...]:
    """Return what each block does where each layer is on its level."""
    if ALL_KEPT in activities and set(levels.values()) == {KEEP}:
        return tuple(activities[ALL_KEPT])
    by_name = {level: {a.name: a for a in activities[level]} for level in {*levels.values()}}
    return tuple(
        by_name[levels[block.name]][block.name] if block.name in levels else block
        for block in activities[RECOMPUTE]
    )


Place = tuple[int, int]
"""A place on the path: layers with experts in host memory, and steps of `Choices.order`."""


@dataclass(frozen=True)
class Choices:
    """All choices that there are for a model, from the one that takes the least memory on."""

    layers: tuple[str, ...]  # Names of the decoder layers, in the model's order
    ladder: Ladder
    hosting: Hosting | None = None  # Where packed experts may lie in host memory

    @cached_property
    def order(self) -> tuple[tuple[str, str], ...]:
        """(layer, its new level) for each step."""
        levels = self.ladder.levels[1:]
        return tuple((name, level) for level in levels for name in reversed(self.layers))

    @cached_property
    def path(self) -> tuple[Place, ...]:
        """The places that a choice may be at, from the least memory to the most."""
        rising, hosting = self.order, self.hosting
        if hosting is None:
            return tuple((0, steps) for steps in range(len(rising) + 1))
        counts = list(hosting.counts)
        host, steps, saved = counts.pop(0), 0, dict.fromkeys(self.layers, 0.0)
        places = [(host, steps)]
        while counts or steps < len(rising):
            rise = rising[steps] if steps < len(rising) else None
            value = 0.0 if rise is None else self.ladder.values[rise[1]]
            if rise is None or (counts and _saves(hosting, host, counts[0], saved, value)):
                host = counts.pop(0)
            else:
                steps, saved[rise[0]] = steps + 1, self.ladder.saved[rise[1]]
            places.append((host, steps))
        return tuple(places)

    def levels_at(self, steps: int) -> dict[str, str]:
        """Return the level of each layer after so many steps."""
        return dict.fromkeys(self.layers, RECOMPUTE) | dict(self.order[:steps])

    def at(self, place: Place, activities: ActivitiesByLevel) -> Choice:
        """Return the choice of a place."""
        host, steps = place
        levels = self.levels_at(steps)
        return Choice(steps, levels, mixed(activities, levels), host)

    def most_kept(
        self,
        activities: ActivitiesByLevel,
        fits: Callable[[Choice], bool],
        highest: str = KEEP,
    ) -> Choice | None:
        """Return the last choice on the path that fits, up to a level; None where none does."""
        most = self.ladder.levels.index(highest) * len(self.layers)
        for place in reversed(self.path):
            if place[1] <= most and fits(choice := self.at(place, activities)):
                return choice
        return None

    def choose(
        self,
        activities: ActivitiesByLevel,
        needed: Callable[[Choice], int],
        limit: int,
        highest: str = KEEP,
        advice: str = MORE_MEMORY,
        tried: Iterable[int] = (),
    ) -> Choice:
        """Return the last choice on the path, up to a level, that needs at most `limit` bytes.

        `tried` are the bytes that other choices need, known not to fit.

        Raises:
            ConfigError: Every choice needs more.
        """
        least = [*tried]

        def fits(choice: Choice) -> bool:
            least[:] = [min((*least, needs := needed(choice)))]
            return needs <= limit

        choice = self.most_kept(activities, fits, highest)
        if choice is None:
            hosting = self.hosting
            where = "" if hosting is None else f" and has experts of {hosting.most} in host memory"
            raise ConfigError(
                f"memory is {limit} bytes ({human_bytes(limit)}), and a step that computes layers "
                f"again{where} takes {human_bytes(least[0])}: {least[0] - limit} bytes are "
                f"missing. {advice}"
            )
        return choice

    def gain(self, activities: ActivitiesByLevel, choice: Choice) -> float:
        """Return how many times as fast a step is as one that computes every layer again.

        With `hosting`, that one also has as many experts in host memory as there may be.
        """
        if self.hosting is not None:
            step = self.hosting.step(choice.host, self.saved_by(choice))
            return self.hosting.step(self.hosting.most, {}) / step
        every = self._value(activities, dict.fromkeys(choice.levels, KEEP))
        kept = self._value(activities, choice.levels) / every if every else 0.0
        return 1 / (1 - RECOMPUTED * kept)

    def saved_by(self, choice: Choice) -> dict[str, float]:
        """Return the part of each layer's recomputation that its level saves."""
        return {name: self.ladder.saved[level] for name, level in choice.levels.items()}

    def _value(self, activities: ActivitiesByLevel, levels: Mapping[str, str]) -> float:
        saved = {level: {a.name: a.saved for a in blocks} for level, blocks in activities.items()}
        rising, total = self.ladder.levels, 0.0
        for name, level in levels.items():
            for below, this in pairwise(rising[: rising.index(level) + 1]):
                kept = max(saved[this][name] - saved[below][name], 0)
                total += self.ladder.values[this] * kept
        return total


def _saves(
    hosting: Hosting, host: int, fewer: int, saved: Mapping[str, float], value: float
) -> bool:
    """Whether a byte saves more time with experts of `host - fewer` layers than by a next step.

    Of that, a MB saves `value` microseconds.
    """
    seconds = hosting.waiting(host, saved) - hosting.waiting(fewer, saved)
    each = value * 1e-12 / hosting.pace.against_measured
    return seconds > each * (hosting.freed(host) - hosting.freed(fewer))


def counted(layers: Iterable[LayerChoice]) -> dict[str, int]:
    """Return how many layers there are of each kind: keep, part, recompute; and host, of all."""
    layers = tuple(layers)
    kinds = Counter(layer.activations for layer in layers)
    host = sum(layer.experts == "host" for layer in layers)
    return {kind: kinds[kind] for kind in (KEEP, "part", RECOMPUTE)} | {"host": host}


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
    every, host = sum(counts[kind] for kind in (KEEP, "part", RECOMPUTE)), counts["host"]
    said = [f"{counts[KEEP]} of {every} layers keep their activations"]
    if counts["part"]:
        said.append(f"{counts['part']} keep part of them")
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
