"""From what each block holds and does to the peak of a training step; pure arithmetic, no torch.

A block is what a device map places whole: a decoder layer, an embedding, the head. A step has three
moments that can be its peak on a device, with K(b) what the blocks that ran before b keep:

    a block's forward       K(b) + forward(b)
    a block's backward      K(b) + backward(b) + gradients of the blocks after b
    the optimizer's step    all gradients + what the step needs for a moment

each on top of weights, statistics, adapters and optimizer states. With a vocabulary of 100,000 and
more it is the backward of the head's block, which the loss belongs to: the 16-bit logits are gone by
then, but three float32 tensors of their size are there (the log-probabilities that forward kept, the
loss's gradient for them, and that of the logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .memory_devices import Span, partition, reserve_nbytes
from .memory_optimizer import OptimizerBytes, optimizer_nbytes

__all__ = ["Activity", "Block", "DeviceUse", "Peak", "Settings", "TARGETS", "peak_of", "spread"]

TARGETS = ("attention", "all-linear", "experts", "attention,experts", "all-linear,experts")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is to be trained.

    Attributes:
        batch: Sequences in a micro-batch.
        seq: Tokens in a sequence.
        rank: LoRA rank r.
        targets: What gets LoRA, one of `TARGETS`, or names of modules separated by commas.
        adapter_dtype: "float32" (what `get_peft_model` gives) or "bfloat16".
        optimizer: One of `memory_optimizer.OPTIMIZERS`.
        checkpointing: Whether layers are computed again in backward.
        accumulation: Micro-batches to a step; over 1, gradients live through all of them.
    """

    batch: int = 1
    seq: int = 4096
    rank: int = 16
    targets: str = "attention"
    adapter_dtype: str = "float32"
    optimizer: str = "adamw"
    checkpointing: bool = True
    accumulation: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """What one block holds for good, in bytes.

    Attributes:
        name: Dotted name of the module or parameter.
        experts: Codes of packed experts.
        linear: Codes of packed Linear layers.
        other: Everything else: norms, embeddings, routers, biases, buffers.
        statistics: Quantization statistics of both.
        trained: Number of weights of each trained tensor.
        decoded: The largest stack or matrix that is decoded at once.
    """

    name: str
    experts: int = 0
    linear: int = 0
    other: int = 0
    statistics: int = 0
    trained: tuple[int, ...] = ()
    decoded: int = 0

    @property
    def weights(self) -> int:
        """Bytes of the packed block without adapters."""
        return self.experts + self.linear + self.other + self.statistics


@dataclass(frozen=True, slots=True)
class Activity:
    """What one block does in a step, in bytes; see `plan_rehearsal`.

    Attributes:
        name: Dotted name.
        kept: Stays from its forward to its backward.
        forward: The most in its forward, beyond what was alive when it started.
        backward: The most in its backward, beyond the same and the gradients that came later.
    """

    name: str
    kept: int
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a device holds in a step.

    Attributes:
        nbytes: Comparable with `torch.cuda.max_memory_allocated`.
        moment: When, in words.
        block: The block whose moment it is, "" for the optimizer's step.
        parts: What it is made of: bytes by component.
        largest: The most that each component has at any moment.
        paged: Optimizer states in pages, which are not counted.
    """

    nbytes: int
    moment: str
    block: str
    parts: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    paged: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of a plan.

    Attributes:
        index: Its number.
        capacity: Its bytes.
        peak: What it holds at most; None where it gets no block.
        reserve: What it holds beside its tensors.
        blocks: Names of its blocks.
    """

    index: int
    capacity: int
    peak: Peak | None
    reserve: int
    blocks: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes of tensors and reserve."""
        return 0 if self.peak is None else self.peak.nbytes + self.reserve

    @property
    def fits(self) -> bool:
        """Whether it is large enough."""
        return self.needed <= self.capacity


COMPONENTS = (
    "packed experts",
    "packed Linear layers",
    "other weights",
    "quantization statistics",
    "adapters",
    "optimizer states",
    "gradients",
    "kept activations",
    "logits and loss",
    "layer at work",
    "decode scratch",
    "optimizer step",
)
"""What a peak is made of, in the order of the table."""

_WORKING = ("logits and loss", "layer at work", "decode scratch", "optimizer step")


def resident_nbytes(blocks: Sequence[Block]) -> int:
    """Bytes of the packed model alone."""
    return sum(block.weights for block in blocks)


def peak_of(
    blocks: Sequence[Block],
    activities: Sequence[Activity],
    settings: Settings,
    itemsize: int,
    last: str = "",
) -> Peak:
    """The most that one device holds.

    Args:
        blocks: Those on the device.
        activities: Of all blocks, in the order in which they run.
        settings: How the model is trained.
        itemsize: Bytes of an element of the adapters.
        last: The block that the loss belongs to.
    """
    mine = {block.name: block for block in blocks}
    states = {
        name: optimizer_nbytes(settings.optimizer, block.trained, itemsize)
        for name, block in mine.items()
    }
    held = sum(states.values(), OptimizerBytes(0, 0, 0))
    trained = {name: itemsize * sum(block.trained) for name, block in mine.items()}
    every = sum(trained.values())
    fixed = {
        "packed experts": sum(block.experts for block in blocks),
        "packed Linear layers": sum(block.linear for block in blocks),
        "other weights": sum(block.other for block in blocks),
        "quantization statistics": sum(block.statistics for block in blocks),
        "adapters": every,
        "optimizer states": held.resident,
    }
    moments = [("the optimizer's step", "", {"gradients": every, "optimizer step": held.step})]
    kept, later = 0, every
    for activity in activities:
        block = mine.get(activity.name)
        if block is None:
            continue
        later -= trained[block.name]
        for what, most in (("forward", activity.forward), ("backward", activity.backward)):
            grads = later if what == "backward" else 0
            parts = {"kept activations": kept, **_work(block, most, activity.name == last)}
            parts["gradients"] = every if settings.accumulation > 1 else grads
            moments.append((f"{what} of {activity.name}", activity.name, parts))
        kept += activity.kept
    return _highest(fixed, moments, kept, held.paged)


def _work(block: Block, most: int, is_last: bool) -> dict[str, int]:
    if is_last:
        return {"logits and loss": most}
    decoded = min(block.decoded, most)
    return {"layer at work": most - decoded, "decode scratch": decoded}


def _highest(
    fixed: dict[str, int], moments: list[tuple[str, str, dict[str, int]]], kept: int, paged: int
) -> Peak:
    moment, block, parts = max(moments, key=lambda entry: sum(entry[2].values()))
    largest = {
        name: max((entry[2].get(name, 0) for entry in moments), default=0) for name in COMPONENTS
    }
    largest |= fixed
    largest["kept activations"] = max(kept, largest["kept activations"])
    whole = {name: fixed.get(name, parts.get(name, 0)) for name in COMPONENTS}
    return Peak(sum(whole.values()), moment, block, whole, largest, paged)


def spread(
    blocks: Sequence[Block],
    activities: Sequence[Activity],
    settings: Settings,
    itemsize: int,
    capacities: Sequence[int],
    last: str = "",
) -> tuple[DeviceUse, ...]:
    """Blocks over devices, in order, so that the fullest device is least full at its peak.

    Args:
        blocks: In the order in which they are placed: embeddings first, norm and head last.
        activities: As for `peak_of`, like the rest.
        settings: How the model is trained.
        itemsize: Bytes of an element of the adapters.
        capacities: Bytes of each device.
        last: The block that the loss belongs to.
    """
    if len(capacities) == 1:
        spans: tuple[Span, ...] = (Span(0, 0, len(blocks)),)
    else:
        load = _Load(blocks, activities, settings, itemsize)
        spans = partition(len(blocks), capacities, load)
    by_device = {span.device: span for span in spans}
    uses = []
    for index, capacity in enumerate(capacities):
        span = by_device.get(index)
        here = () if span is None else blocks[span.first : span.last]
        most = peak_of(here, activities, settings, itemsize, last) if here else None
        names = tuple(block.name for block in here)
        reserve = 0 if most is None else reserve_nbytes(most.nbytes)
        uses.append(DeviceUse(index, capacity, most, reserve, names))
    return tuple(uses)


class _Load:
    """`peak_of(...).nbytes` for many ranges of blocks, without its parts."""

    def __init__(
        self,
        blocks: Sequence[Block],
        activities: Sequence[Activity],
        settings: Settings,
        itemsize: int,
    ) -> None:
        states = [optimizer_nbytes(settings.optimizer, b.trained, itemsize) for b in blocks]
        self.gradients = [itemsize * sum(block.trained) for block in blocks]
        self.steps = [state.step for state in states]
        self.fixed = [
            block.weights + grads + state.resident
            for block, grads, state in zip(blocks, self.gradients, states, strict=True)
        ]
        place = {block.name: index for index, block in enumerate(blocks)}
        self.run = [(place[a.name], a) for a in activities if a.name in place]
        self.accumulates = settings.accumulation > 1
        self.known: dict[tuple[int, int], int] = {}

    def __call__(self, first: int, last: int) -> int:
        if (first, last) not in self.known:
            self.known[first, last] = self._total(first, last)
        return self.known[first, last]

    def _total(self, first: int, last: int) -> int:
        every = sum(self.gradients[first:last])
        most, kept, later = every + sum(self.steps[first:last]), 0, every
        for index, activity in self.run:
            if not first <= index < last:
                continue
            later -= self.gradients[index]
            before, after = (every, every) if self.accumulates else (0, later)
            most = max(most, kept + activity.forward + before, kept + activity.backward + after)
            kept += activity.kept
        return sum(self.fixed[first:last]) + most
