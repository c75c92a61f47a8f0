"""Packed experts in host memory: what of the device they free, what copies cost; free of torch.

The layers whose experts lie there are the last ones. Two slots on the device hold one layer's
experts each, so that one or two layers free nothing. While a layer computes, the next one's experts
are copied: forwards, then backwards, where a layer's recomputation shares its backward's copy. In
each direction the two layers that come first are still there from the pass before.

    forward                  copies of all but the first two, beside the layers' forwards
    backward                 copies of all but the last two, beside their backwards

What a copy takes is bytes over `Pace.link`; what a layer computes is taken to be its products with
weights, 6 operations for each active weight and token, over `Pace.rate`. That leaves out scores
of attention: a layer computes for longer than it is taken to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLOTS = 2
"""Slots on the device: one is read while the other is filled; an end of use is known at once."""

ALIGNMENT = 256
"""Bytes: of each tensor's address in a slot, as torch's allocator has it."""

RECOMPUTED = 0.26
"""The part of a step that computing all layers again takes (Qwen3-30B-A3B, one H200, micro-batch 4:
16,521 tokens/s computing all again, and 22,483 keeping all); a forward takes as much."""

_RATE = 300e12


@dataclass(frozen=True, slots=True)
class Pace:
    """How quick a device copies and computes. As given here: an H200, where all were measured."""

    link: float = 55e9  # Bytes a second, from page-locked host memory
    rate: float = _RATE  # Operations a second in a training step

    @property
    def against_measured(self) -> float:
        """How many times as quick as an H200 it computes."""
        return self.rate / _RATE


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The packed experts of one decoder layer."""

    name: str
    nbytes: int  # Of codes and statistics on the device
    slot: int  # Of the same in a slot, and in host memory


@dataclass(frozen=True)
class Hosting:
    """What decoder layers may have in host memory, and how long a step then takes.

    `count` is a number of layers in host memory; `saved` the part of each decoder layer's
    recomputation that it does not need.
    """

    layers: tuple[ExpertLayer, ...]  # Those with packed experts, in the model's order
    most: int  # How many of them, from the last one, may be in host memory
    pace: Pace
    seconds: Mapping[str, float]  # Of each block in a step that computes all again

    @classmethod
    def of(
        cls, layers: tuple[ExpertLayer, ...], most: int, pace: Pace, active: Mapping[str, int]
    ) -> Hosting:
        """Take what blocks compute by their active weights times tokens.

        Each is multiplied and added in the forward, its recomputation and the backward.
        """
        return cls(layers, most, pace, {name: 6 * n / pace.rate for name, n in active.items()})

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of layers that are worth it: each frees more than the next, down to 0."""
        found = [0]
        for count in range(1, self.most + 1):
            if self.freed(count) > self.freed(found[-1]):
                found.append(count)
        return tuple(reversed(found))

    def hosted(self, count: int) -> tuple[ExpertLayer, ...]:
        """Return the layers in host memory."""
        return self.layers[len(self.layers) - count :]

    def slots(self, count: int) -> int:
        """Return the bytes of the slots."""
        return slots_nbytes(self.hosted(count))

    def freed(self, count: int) -> int:
        """Return the bytes of the device that are freed, less slots."""
        return sum(layer.nbytes for layer in self.hosted(count)) - self.slots(count)

    def host_nbytes(self, count: int) -> int:
        """Return the bytes of host memory."""
        return sum(layer.slot for layer in self.hosted(count))

    def copies(self, count: int) -> float:
        """Return the seconds that the copies of a step take."""
        return sum(self._copied(count))

    def computing(self, saved: Mapping[str, float]) -> float:
        """Return the seconds that a step computes."""
        every = self.seconds.items()
        return sum(took * (1 - RECOMPUTED * saved.get(name, 0.0)) for name, took in every)

    def waiting(self, count: int, saved: Mapping[str, float]) -> float:
        """Return the seconds of copies that computing does not hide."""
        forward = backward = 0.0
        for layer in self.hosted(count):
            seconds = self.seconds.get(layer.name, 0.0)
            forward += seconds * RECOMPUTED
            backward += seconds * (1 - RECOMPUTED - RECOMPUTED * saved.get(layer.name, 0.0))
        copied, again = self._copied(count)
        return max(copied - forward, 0.0) + max(again - backward, 0.0)

    def step(self, count: int, saved: Mapping[str, float]) -> float:
        """Return the seconds of a step."""
        return self.computing(saved) + self.waiting(count, saved)

    def sentence(self, count: int, saved: Mapping[str, float]) -> str:
        """Say what the copies of a step take, to be added to a sentence."""
        copies, waiting = self.copies(count), self.waiting(count, saved)
        computing = self.computing(saved)
        said = f"; copies {copies:.2g} s a step, "
        if waiting < 0.005 * copies:
            return f"{said}hidden by {computing:.2g} s of computing"
        return f"{said}of which {waiting:.2g} s are not hidden by {computing:.2g} s of computing"

    def _copied(self, count: int) -> tuple[float, float]:
        """Return the seconds of a forward's copies, and of a backward's."""
        each = [layer.slot / self.pace.link for layer in self.hosted(count)]
        return sum(each[SLOTS:]), sum(each[: max(count - SLOTS, 0)])


def slots_nbytes(layers: Sequence[ExpertLayer]) -> int:
    """Return the bytes of the slots for these layers."""
    return min(len(layers), SLOTS) * max((layer.slot for layer in layers), default=0)
