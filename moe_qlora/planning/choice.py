"""Which decoder layers keep what, and whose packed experts lie in host memory; free of torch.

Levels are those of `levels.py`. From all layers computed again, steps raise one layer by one level:
all layers to the one that keeps a part, from the last layer to the first, then all to the one that
keeps all. So more memory for activations never keeps less.

Packed experts may lie in host memory: those of the last layers. Two slots on the device hold one
layer's experts each, so that one or two layers free nothing. While a layer computes, the next one's
experts are copied: forwards, then backwards, where a layer's recomputation shares its backward's
copy. In each direction the two layers that come first are still there from the pass before.

    forward                  copies of all but the first two, beside the layers' forwards
    backward                 copies of all but the last two, beside their backwards

A copy takes its bytes over `Pace.link`; a layer computes 6 operations for each active weight and
token, over `Pace.rate`, without scores of attention: it computes for longer than it is taken to.
The best choice is the quickest step of those that fit.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout import human_bytes
from .budget import Activity
from .devices import Pace

RECOMPUTE, PART, ATTENTION, KEEP = LEVELS = ("recompute", "part", "attention", "keep")
"""A model's layers are on three of these: on "attention" in place of "part" in long sequences."""

SLOTS = 2
"""Slots on the device: one is read while the other is filled; an end of use is known at once."""

ALIGNMENT = 256  # Bytes: of each tensor's address in a slot, as torch's allocator has it

# The part of a step that computing all layers again takes (Qwen3-30B-A3B, one H200, micro-batch 4:
# 16,521 tokens/s computing all again, and 22,483 keeping all); a forward takes as much.
_RECOMPUTED = 0.26
# Of a layer's recomputation, by experts, attention and the rest, for sequences of so many tokens.
_EXPERTS, _ATTENTION, _REST, _MEASURED = 0.59, 0.18, 0.23, 4096
# Tokens from where attention alone is kept: the experts beside it take four times its bytes, for
# as much time again.
_LONG = 3 * _MEASURED


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The packed experts of one decoder layer."""

    name: str
    nbytes: int  # Of codes and statistics on the device
    slot: int  # Of the same in a slot, and in host memory


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What one decoder layer keeps."""

    name: str
    activations: str  # "keep", "part" or "recompute"
    experts: str = "device"  # Where its packed experts are: "device" or "host"


@dataclass(frozen=True, slots=True)
class PlannedFit:
    """What decoder layers keep between forward and backward, and what a step then takes."""

    layers: tuple[LayerChoice, ...]  # In the model's order
    peak: int  # Bytes of tensors on the fullest device
    needed: int  # With the reserve of the process, where there is one
    memory: int  # Bytes of that device
    gain: float  # Times as fast as computing all again and copying all experts, about
    host: int | None  # Bytes of packed experts in host memory; None where there may be none
    copies: float  # Seconds of a step's copies
    waiting: float  # Those of them that computing does not hide
    computing: float  # Seconds that decoder layers compute, about

    @property
    def fits(self) -> bool:
        """False where not even computing all layers again does."""
        return self.needed <= self.memory

    @property
    def counts(self) -> dict[str, int]:
        """Layers that "keep" all, "part" or nothing ("recompute"), and with experts on "host"."""
        kinds = Counter(layer.activations for layer in self.layers)
        host = sum(layer.experts == "host" for layer in self.layers)
        return {kind: kinds[kind] for kind in (KEEP, PART, RECOMPUTE)} | {"host": host}

    def __str__(self) -> str:
        counts, host = self.counts, self.counts["host"]
        said = f"{counts[KEEP]} of {len(self.layers)} layers keep their activations"
        said += f", {counts[PART]} keep part of them" * bool(counts[PART])
        if host:
            said += f", experts of {host} lie in {human_bytes(self.host or 0)} of host memory"
        if self.needed < 1 << 28:
            said += f": {human_bytes(self.needed)} of {human_bytes(self.memory)}"
        else:
            said += f": {self.needed / 2**30:.1f} of {self.memory / 2**30:.4g} GiB"
        if self.gain > 1.005:
            than = " and copying all experts" if self.host is not None else ""
            said += f", about {self.gain:.2f} times as fast as computing all again{than}"
        return said + (copies_sentence(self.copies, self.waiting, self.computing) if host else "")


def copies_sentence(copies: float, waiting: float, computing: float) -> str:
    """Say what the copies of a step take, to be added to a sentence."""
    said, beside = f"; copies {copies:.2g} s a step, ", f"{computing:.2g} s of computing"
    if waiting < 0.005 * copies:
        return f"{said}hidden by {beside}"
    return f"{said}of which {waiting:.2g} s are not hidden by {beside}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What layers keep, and what a step does then."""

    levels: Mapping[str, str]  # Decoder layer -> its level, in the model's order
    activities: tuple[Activity, ...]
    host: int  # Layers with experts in host memory, the last of those that have experts


@dataclass(frozen=True)
class Choices:
    """All choices that there are for a model."""

    active: Mapping[str, int]  # Weights times tokens of each decoder layer, in the model's order
    seq: int
    experts: tuple[ExpertLayer, ...]  # Layers with packed experts, in the model's order
    most: int  # How many of them, from the last one, may be in host memory
    pace: Pace

    @cached_property
    def levels(self) -> tuple[str, str, str]:
        """The levels in the order in which layers keep more."""
        return RECOMPUTE, ATTENTION if self.seq > _LONG else PART, KEEP

    def saved(self, levels: Mapping[str, str]) -> dict[str, float]:
        """Return the part of each layer's recomputation that its level saves."""
        attention = _ATTENTION * self.seq / _MEASURED  # grows with a sequence; its bytes do not
        kept = attention + (_EXPERTS if self.levels[1] == PART else 0)
        parts = {RECOMPUTE: 0.0, self.levels[1]: kept / (attention + _EXPERTS + _REST), KEEP: 1.0}
        return {name: parts[level] for name, level in levels.items()}

    def at(
        self, steps: int, activities: Callable[[str], Sequence[Activity]], host: int = 0
    ) -> Choice:
        """Return the choice after so many steps; asks for levels that layers are on alone."""
        every = len(self.active)
        levels = {
            name: self.levels[(steps >= every - place) + (steps >= 2 * every - place)]
            for place, name in enumerate(self.active)
        }
        known = {level: {a.name: a for a in activities(level)} for level in {*levels.values()}}
        blocks = [
            known[levels[a.name]][a.name] if a.name in levels else a for a in activities(RECOMPUTE)
        ]
        return Choice(levels, tuple(blocks), host)

    def best(
        self,
        activities: Callable[[str], Sequence[Activity]],
        lacks: Callable[[tuple[Activity, ...]], int],
    ) -> Choice | None:
        """Return the quickest choice that fits; None for none.

        `activities` returns what blocks do in a step with all decoder layers on a level, and
        `lacks` the bytes that must be freed for such activities, 0 or less for none.
        """
        found: list[tuple[float, int, Choice]] = []
        freed = [self.freed(host) for host in range(self.most + 1)]
        every = 2 * len(self.active)
        least = self.at(0, activities)
        for steps in reversed(range(every + 1)):
            # Before a part is measured
            if steps == every - 1 and not found and lacks(least.activities) > max(freed):
                return None
            choice = self.at(steps, activities)
            short, saved = lacks(choice.activities), self.saved(choice.levels)
            for host in (host for host, nbytes in enumerate(freed) if nbytes >= short):
                own = Choice(choice.levels, choice.activities, host)
                found.append((self.step(host, saved), host, own))
            if short <= 0:  # With fewer steps it is slower
                break
        return min(found, key=lambda each: each[:2])[2]

    def fit(self, choice: Choice, peak: int, needed: int, memory: int) -> PlannedFit:
        """Return what is set on layers by a choice, which takes so many bytes."""
        saved, hosted = self.saved(choice.levels), {x.name for x in self.hosted(choice.host)}
        layers = (
            LayerChoice(
                name,
                level if level in (RECOMPUTE, KEEP) else PART,
                "host" if name in hosted else "device",
            )
            for name, level in choice.levels.items()
        )
        return PlannedFit(
            tuple(layers),
            peak,
            needed,
            memory,
            self.step(self.most, {}) / self.step(choice.host, saved),
            self.host_nbytes(choice.host) if self.most else None,
            *self.times(choice.host, saved),
        )

    def hosted(self, count: int) -> tuple[ExpertLayer, ...]:
        """Return the layers in host memory."""
        return self.experts[len(self.experts) - count :]

    def freed(self, count: int) -> int:
        """Return the bytes of the device that are freed, less slots."""
        return sum(layer.nbytes for layer in self.hosted(count)) - slots_nbytes(self.hosted(count))

    @property
    def slots(self) -> int:
        """Bytes of the slots, with as many experts in host memory as may be."""
        return slots_nbytes(self.hosted(self.most))

    def host_nbytes(self, count: int) -> int:
        """Return the bytes of host memory."""
        return sum(layer.slot for layer in self.hosted(count))

    def times(self, count: int, saved: Mapping[str, float]) -> tuple[float, float, float]:
        """Return seconds of a step: of copies, of those that computing does not hide, of computing.

        `saved` is the part of each decoder layer's recomputation that it does not need.
        """
        hosted = self.hosted(count)
        copies = [layer.slot / self.pace.link for layer in hosted]
        forward, backward = sum(copies[SLOTS:]), sum(copies[: max(count - SLOTS, 0)])
        took = {name: 6 * max(weights, 1) / self.pace.rate for name, weights in self.active.items()}
        again = {name: _RECOMPUTED * saved.get(name, 0.0) for name in took}
        computing = sum(seconds * (1 - again[name]) for name, seconds in took.items())
        names = [layer.name for layer in hosted if layer.name in took]
        waiting = max(forward - sum(took[name] * _RECOMPUTED for name in names), 0.0)
        beside = sum(took[name] * (1 - _RECOMPUTED - again[name]) for name in names)
        waiting += max(backward - beside, 0.0)
        return forward + backward, waiting, computing

    def step(self, count: int, saved: Mapping[str, float]) -> float:
        """Return the seconds of a step."""
        return sum(self.times(count, saved)[1:])


def slots_nbytes(layers: Sequence[ExpertLayer]) -> int:
    """Return the bytes of the slots for these layers."""
    return min(len(layers), SLOTS) * max((layer.slot for layer in layers), default=0)
