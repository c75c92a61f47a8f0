"""From what each block holds and does to the peak of a training step; pure arithmetic, no torch.

A block is what a device map places whole: a decoder layer, an embedding, the head. A step has three
moments that can be its peak on a device, with K(b) what the blocks that ran before b keep:

    a block's forward       K(b) + forward(b)
    a block's backward      K(b) + backward(b) + gradients of the blocks after b
    the optimizer's step    all gradients + what the step needs for a moment

each on top of weights, statistics, adapters and optimizer states. With a vocabulary of 100,000 and
more it is the backward of the head's block, which the loss belongs to: the 16-bit logits are gone
by then, but three float32 tensors of their size are there (the log-probabilities that forward kept,
the loss's gradient for them, and that of the logits).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .devices import Span, partition, reserve_nbytes
from .experts import ExpertsCall, kept_nbytes, scratch_nbytes

LIBRARY_BYTES = 64 << 20
"""cuBLAS workspaces, which torch takes from its own allocator: 32 MiB on Hopper for each of the two
threads that multiply, forward's and backward's."""

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
        scratch: Bytes for decoded experts that all layers of a device share, and that stay.
    """

    batch: int = 1
    seq: int = 4096
    rank: int = 16
    targets: str = "attention"
    adapter_dtype: str = "float32"
    optimizer: str = "adamw"
    checkpointing: bool = True
    accumulation: int = 1
    scratch: int = 0


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
    def weights(self) -> int:
        """Bytes of its blocks, packed, without adapters."""
        return 0 if self.peak is None else sum(self.peak.parts[name] for name in COMPONENTS[:4])

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
    "library workspace",
    "gradients",
    "kept activations",
    "logits and loss",
    "layer at work",
    "decode scratch",
    "optimizer step",
)
"""What a peak is made of, in the order of the table."""


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
        "library workspace": LIBRARY_BYTES,
    }
    if settings.scratch:
        fixed["decode scratch"] = settings.scratch * any(block.experts for block in blocks)
    moments = [("the optimizer's step", "", {"gradients": every, "optimizer step": held.step})]
    kept, later = 0, every
    for activity in activities:
        block = mine.get(activity.name)
        if block is None:
            continue
        later -= trained[block.name]
        for what, most in (("forward", activity.forward), ("backward", activity.backward)):
            grads = later if what == "backward" else 0
            work = _work(block, most, settings, activity.name == last)
            parts = {"kept activations": kept, **work}
            parts["gradients"] = every if settings.accumulation > 1 else grads
            moments.append((f"{what} of {activity.name}", activity.name, parts))
        kept += activity.kept
    return _highest(fixed, moments, held.paged)


def _work(block: Block, most: int, settings: Settings, is_last: bool) -> dict[str, int]:
    if is_last:
        return {"logits and loss": most}
    if settings.scratch:
        return {"layer at work": most}
    decoded = min(block.decoded, most)
    return {"layer at work": most - decoded, "decode scratch": decoded}


def _highest(
    fixed: dict[str, int], moments: list[tuple[str, str, dict[str, int]]], paged: int
) -> Peak:
    moment, block, parts = max(moments, key=lambda entry: sum(entry[2].values()))
    largest = {
        name: max((entry[2].get(name, 0) for entry in moments), default=0) for name in COMPONENTS
    }
    largest |= fixed
    whole = {name: fixed.get(name, parts.get(name, 0)) for name in COMPONENTS}
    return Peak(sum(whole.values()), moment, block, whole, largest, paged)


def spread(
    groups: Sequence[Sequence[Block]],
    activities: Sequence[Activity],
    settings: Settings,
    itemsize: int,
    capacities: Sequence[int],
    last: str = "",
) -> tuple[DeviceUse, ...]:
    """Blocks over devices, in order, so that the fullest device is least full at its peak.

    Args:
        groups: Blocks that must share a device, in the order in which they are placed.
        activities: As for `peak_of`, like the rest.
        settings: How the model is trained.
        itemsize: Bytes of an element of the adapters.
        capacities: Bytes of each device.
        last: The block that the loss belongs to.
    """
    spans: tuple[Span, ...] = (Span(0, 0, len(groups)),)
    if len(capacities) > 1:
        load = _Load(groups, activities, settings, itemsize)
        spans = partition(len(groups), capacities, load)
    by_device = {span.device: span for span in spans}
    uses = []
    for index, capacity in enumerate(capacities):
        span = by_device.get(index)
        chosen = () if span is None else groups[span.first : span.last]
        here = [block for group in chosen for block in group]
        most = peak_of(here, activities, settings, itemsize, last) if here else None
        reserve = 0 if most is None else reserve_nbytes(most.nbytes)
        names = tuple(block.name for block in here)
        uses.append(DeviceUse(index, capacity, most, reserve, names))
    return tuple(uses)


class _Load:
    """`peak_of(...).nbytes` for many ranges of blocks, without its parts."""

    def __init__(
        self,
        groups: Sequence[Sequence[Block]],
        activities: Sequence[Activity],
        settings: Settings,
        itemsize: int,
    ) -> None:
        states = [
            optimizer_nbytes(settings.optimizer, [n for b in group for n in b.trained], itemsize)
            for group in groups
        ]
        own = {b.name: itemsize * sum(b.trained) for group in groups for b in group}
        self.gradients = [sum(own[block.name] for block in group) for group in groups]
        self.steps = [state.step for state in states]
        self.fixed = [
            sum(block.weights for block in group) + grads + state.resident
            for group, grads, state in zip(groups, self.gradients, states, strict=True)
        ]
        place = {block.name: index for index, group in enumerate(groups) for block in group}
        self.run = [(place[a.name], own[a.name], a) for a in activities if a.name in place]
        self.accumulates = settings.accumulation > 1
        self.scratch = settings.scratch
        self.experts = [any(block.experts for block in group) for group in groups]
        self.known: dict[tuple[int, int], int] = {}

    def __call__(self, first: int, last: int) -> int:
        if (first, last) not in self.known:
            self.known[first, last] = self._total(first, last)
        return self.known[first, last]

    def _total(self, first: int, last: int) -> int:
        every = sum(self.gradients[first:last])
        most, kept, later = every + sum(self.steps[first:last]), 0, every
        for index, grads, activity in self.run:
            if not first <= index < last:
                continue
            later -= grads
            before, after = (every, every) if self.accumulates else (0, later)
            most = max(most, kept + activity.forward + before, kept + activity.backward + after)
            kept += activity.kept
        scratch = self.scratch * any(self.experts[first:last])
        return LIBRARY_BYTES + scratch + sum(self.fixed[first:last]) + most


def estimate(
    block: Block, settings: Settings, hidden: int, outputs: int, experts: ExpertsCall | None
) -> Activity:
    """What a block does, from its sizes alone: for layers that cannot be rehearsed.

    Args:
        block: The block.
        settings: How the model is trained.
        hidden: H.
        outputs: Features that its Linear layers give out, together.
        experts: The call of its experts, None where it has none.
    """
    tokens = settings.batch * settings.seq
    inner = 2 * tokens * (outputs + 8 * hidden)
    before, after = (0, 0) if experts is None else scratch_nbytes(experts)
    if experts is not None:
        inner += kept_nbytes(experts)
    kept = 2 * tokens * hidden if settings.checkpointing else inner
    return Activity(block.name, kept, inner + before, inner + after)


def estimate_head(name: str, settings: Settings, vocabulary: int) -> Activity:
    """The same for the head with its loss: 16-bit logits, then three float32 tensors like them."""
    logits = settings.batch * settings.seq * vocabulary
    return Activity(name, 4 * logits, 10 * logits, 12 * logits)


OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")

ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}
"""Other names that transformers' Trainer has for these."""

_WIDE = 4
_BLOCK = 256
_SMALL_8BIT = 4096
_SMALL_PAGED = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What an optimizer holds.

    Attributes:
        resident: On the device for good.
        paged: In pages that move to the device while they are used.
        step: On the device for the moment of a step, beside states and gradients.
    """

    resident: int
    paged: int
    step: int

    def __add__(self, other: OptimizerBytes) -> OptimizerBytes:
        return OptimizerBytes(
            self.resident + other.resident, self.paged + other.paged, self.step + other.step
        )


def optimizer_nbytes(optimizer: str, sizes: Iterable[int], itemsize: int) -> OptimizerBytes:
    """Bytes for trained tensors of these sizes.

    Args:
        optimizer: One of `OPTIMIZERS`.
        sizes: Number of weights of each trained tensor.
        itemsize: Bytes of one of their elements.

    Raises:
        ValueError: There is no such optimizer.
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optimizer is {optimizer!r}; expected one of {known}")
    total = OptimizerBytes(0, 0, 0)
    for size in sizes:
        total += _of_one(optimizer, size, itemsize)
    return total


def _of_one(optimizer: str, size: int, itemsize: int) -> OptimizerBytes:
    if optimizer == "adamw":
        # The step takes the root of all second moments at once (torch's foreach implementation).
        return OptimizerBytes(2 * size * itemsize, 0, size * itemsize)
    eight = optimizer.endswith("8bit") and size >= _SMALL_8BIT
    moments = 2 * size * (1 if eight else _WIDE)
    statistics = 2 * _WIDE * -(-size // _BLOCK) if eight else 0
    if optimizer.startswith("paged") and size >= _SMALL_PAGED:
        return OptimizerBytes(statistics, moments, 0)
    return OptimizerBytes(moments + statistics, 0, 0)


__all__ = [
    "TARGETS",
    "Activity",
    "Block",
    "DeviceUse",
    "Peak",
    "Settings",
    "peak_of",
    "spread",
]
