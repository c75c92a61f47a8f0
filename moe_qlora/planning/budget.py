"""The peak of a training step from the memory of its blocks; pure arithmetic, no torch.

A block is what a device map places whole: a decoder layer, an embedding, the head. A step has three
moments that can be its peak on a device, with K(b) the bytes that the blocks before b have saved:

    a block's forward       K(b) + forward(b)
    a block's backward      K(b) + backward(b) + gradients of the blocks after b
    the optimizer's step    all gradients + what the step needs for a moment

each on top of weights, statistics, adapters and optimizer states. With a large vocabulary it is the
backward of the head's block, where three float32 tensors of the logits' size are there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Self

from ..kernels.limits import cdiv
from .devices import reserve_nbytes

LIBRARY_BYTES = 64 << 20
"""cuBLAS workspaces, which torch takes from its own allocator: 32 MiB on Hopper for each of the two
threads that multiply, forward's and backward's."""

OPTIMIZERS = {name: name for name in ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")} | {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}
"""Optimizers by their names here and in transformers' Trainer."""

_FLOAT32 = 4
# bitsandbytes' own limits: weights to a block of statistics, and the smallest tensor whose moments
# are kept in 8 bit, and in pages.
_BLOCK = 256
_SMALLEST_8BIT = 4096
_SMALLEST_PAGED = 100_000

WEIGHTS = {
    "packed experts": ("experts",),
    "packed Linear layers": ("linear",),
    "other weights": ("other",),
    "quantization statistics": ("statistics", "expert statistics"),
}
"""The components of a peak that are weights, and the parts of `BlockTensor`s that they add up."""

FIXED = (*WEIGHTS, "adapters", "optimizer states", "library workspace")
"""The components that are there at any time."""

COMPONENTS = (
    *FIXED,
    "gradients",
    "gradient buckets",
    "gathered weights",
    "kept activations",
    "logits and loss",
    "layer at work",
    "decode scratch",
    "optimizer step",
)
"""The components of a peak, in the order of the table."""

ENGINES = {"ddp": "DDP", "fsdp": "FSDP2"}  # The engines by the names that `plan` takes


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """One tensor that a block holds, as an engine may split it."""

    part: str  # One of those in `WEIGHTS`, or "trained"
    rows: int  # Size of its first dimension
    row_numel: int  # Elements in a row
    itemsize: int
    parameter: bool = True  # A buffer is never split
    padding: int = 0  # Rows that are there in runs of several ranks alone

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.rows - self.padding) * self.row_numel

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Block:
    """The weights of one block."""

    name: str
    tensors: tuple[BlockTensor, ...] = ()
    layer: bool = False  # Whether it is a decoder layer, which engines gather as one
    slot: int = 0  # Bytes of packed experts with statistics in a slot of `choice.py`
    active: int = 0  # Weights that one token is multiplied with

    @property
    def trained(self) -> tuple[int, ...]:
        """Number of weights of each trained tensor."""
        return tuple(tensor.numel for tensor in self.tensors if tensor.part == "trained")

    @cached_property
    def weights(self) -> int:
        """Bytes of the packed block without adapters."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.part != "trained")

    def nbytes(self, *parts: str) -> int:
        """Return the bytes of tensors of these parts."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.part in parts)

    def without_experts(self) -> Self:
        """Return the block with its packed experts in host memory."""
        apart = ("experts", "expert statistics")
        return replace(self, tensors=tuple(t for t in self.tensors if t.part not in apart))


@dataclass(frozen=True, slots=True)
class Activity:
    """The memory of one block in a step, in bytes; see `step.py`."""

    name: str
    saved: int  # Saved by its forward for its backward
    forward: int  # The most in its forward, beyond what was alive when it started
    backward: int  # The most in its backward, beyond the same and the gradients that came later
    gathered: int = 0  # Other ranks' shares that an engine gathers meanwhile
    reduced: int = 0  # In backward also: gradients on their way to all ranks


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that splits a model or its batches over ranks: a process and a device each.

    A rank is one process with one device, and has a micro-batch of its own: activations, logits and
    workspace are those of one process. What differs, for N ranks:

    ddp    DistributedDataParallel. Everything is whole on each rank. Beside the gradients there are
           buckets of 25 MiB, together as large as they are, since `gradient_as_bucket_view` is off
           by default: each gradient is copied into its bucket and back.
    fsdp   FSDP2: `fully_shard` on each decoder layer and on the root. Each parameter is cut along
           its first dimension as torch.chunk cuts, and padded: a rank holds ceil(rows / N) rows of
           codes, statistics, adapters, gradients and optimizer states. Buffers (code tables among
           them) are whole. The root's own parameters (embeddings, last norm, head) are gathered
           through the step. While a layer computes, two are there: its own, and the buffer into
           which the next is gathered, or of which it was copied. In backward a layer's gradients
           are whole once more, as the input of the reduce-scatter.
    """

    name: str  # Of `ENGINES`: "ddp" or "fsdp"
    ranks: int  # How many ranks hold the model together, each with data of its own

    def _on_rank(self, tensor: BlockTensor) -> BlockTensor:
        parts = self.ranks if self.name == "fsdp" and tensor.parameter else 1
        return replace(tensor, rows=cdiv(tensor.rows, parts), padding=0)

    def on_rank(self, block: Block) -> Block:
        """Return what one rank holds of a block."""
        return replace(block, tensors=tuple(map(self._on_rank, block.tensors)))

    def with_gathered(
        self, activities: Sequence[Activity], blocks: Mapping[str, Block]
    ) -> tuple[Activity, ...]:
        """Return activities, in running order, with what is gathered while each goes on.

        `blocks` are those of the whole model, by name.
        """
        if self.name != "fsdp":
            return tuple(activities)

        def gathered_nbytes(block: Block, part: str | None = None) -> int:
            # With padding; buffers were never cut.
            cut = [t for t in block.tensors if t.parameter and part in (None, t.part)]
            return self.ranks * sum(self._on_rank(tensor).nbytes for tensor in cut)

        whole = {name: gathered_nbytes(block) for name, block in blocks.items()}
        root = sum(size for name, size in whole.items() if not blocks[name].layer)
        layers = [whole[a.name] if blocks[a.name].layer else 0 for a in activities]
        trained = [gathered_nbytes(blocks[a.name], "trained") for a in activities]
        found = []
        for place, activity in enumerate(activities):
            before = next((size for size in reversed(layers[:place]) if size), 0)
            after = next((size for size in layers[place + 1 :] if size), 0)
            # The root's own are copied out of a buffer as large, which the first layer's frees.
            buffer = root if place == 0 else max(before, layers[place], after)
            gathered, reduced = root + layers[place] + buffer, max(trained[place : place + 2])
            found.append(replace(activity, gathered=gathered, reduced=reduced))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is to be trained."""

    batch: int = 1
    seq: int = 4096
    rank: int = 16  # LoRA rank r
    targets: str = "attention"  # As of `plan`
    adapter_dtype: str = "float32"  # "float32" (what `get_peft_model` gives) or "bfloat16"
    optimizer: str = "adamw"  # One of `OPTIMIZERS`
    checkpointing: bool = True  # Whether layers are computed again in backward
    accumulation: int = 1  # Micro-batches to a step; over 1, gradients live through all of them
    attention: str | None = None  # As `attn_implementation`; None is what the model says
    prepared: bool = False  # Whether the loss is computed in Liger's chunks, without all logits
    engine: Engine | None = None  # None in one process, spread over devices or not
    offload: bool = False  # Whether packed experts lie in host memory


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a device in a step."""

    nbytes: int  # Comparable with `torch.cuda.max_memory_allocated`
    moment: str  # When, in words
    parts: dict[str, int] = field(default_factory=dict)  # Bytes by component
    largest: dict[str, int] = field(default_factory=dict)  # The most of each at any moment
    paged: int = 0  # Optimizer states in pages, which are not counted


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of a plan."""

    index: int
    capacity: int  # Bytes
    peak: Peak | None  # None where it gets no block
    reserve: int  # Bytes of the process in addition to its tensors
    blocks: tuple[str, ...]  # Names of its blocks

    @property
    def weights(self) -> int:
        """Bytes of its blocks, packed, without adapters."""
        return 0 if self.peak is None else sum(map(self.peak.parts.__getitem__, WEIGHTS))

    @property
    def needed(self) -> int:
        """Bytes of tensors and reserve."""
        return 0 if self.peak is None else self.peak.nbytes + self.reserve

    @property
    def fits(self) -> bool:
        """True if the device is large enough."""
        return self.needed <= self.capacity


def optimizer_nbytes(
    optimizer: str, sizes: Sequence[int], itemsize: int, *, foreach: bool = True
) -> tuple[int, int, int]:
    """Return an optimizer's bytes for trained tensors of these sizes, of `itemsize` bytes a weight.

    Those on the device at any time; those in pages, which move there while they are used; and a
    step's temporaries, in addition to states and gradients.
    """
    if optimizer == "adamw":
        # The step takes the root of all second moments at once (torch's foreach implementation, on
        # CUDA), or of one after the other: the root, its quotient, and that of the weight before.
        total, largest = itemsize * sum(sizes), itemsize * max(sizes, default=0)
        return 2 * total, 0, total if foreach else 3 * largest
    resident = paged = 0
    for size in sizes:
        eight = optimizer.endswith("8bit") and size >= _SMALLEST_8BIT
        moments = 2 * size * (1 if eight else _FLOAT32)
        resident += 2 * _FLOAT32 * cdiv(size, _BLOCK) if eight else 0
        if optimizer.startswith("paged") and size >= _SMALLEST_PAGED:
            paged += moments
        else:
            resident += moments
    return resident, paged, 0


@dataclass(frozen=True)
class StepBudget:
    """The memory of any run of neighbouring blocks on one device in a training step.

    The blocks of a group must share a device; groups come in placing order, activities in running
    order, and the loss belongs to the last.
    """

    groups: Sequence[Sequence[Block]]
    activities: Sequence[Activity]
    settings: Settings
    itemsize: int  # Of the adapters
    workspace: int = 0  # Bytes of dequantized experts that all layers of a device share
    extra: Mapping[str, int] = field(default_factory=dict)  # More at any time, by component
    library: int = LIBRARY_BYTES  # Of libraries' workspaces
    foreach: bool = True  # Whether AdamW's step takes all weights at once, as it does on CUDA

    @cached_property
    def _own(self) -> dict[str, int]:
        """Bytes of the trained weights of each block."""
        return {b.name: self.itemsize * sum(b.trained) for group in self.groups for b in group}

    @cached_property
    def _place(self) -> dict[str, int]:
        return {block.name: at for at, group in enumerate(self.groups) for block in group}

    def nbytes(self, first: int, last: int) -> int:
        """Return the peak of the groups [first, last) on one device."""
        highest = max(sum(parts.values()) for _, parts in self._moments(first, last))
        return sum(self._fixed(first, last).values()) + highest

    def peak(self, first: int = 0, last: int | None = None) -> Peak:
        """Return the same with its parts, by default of all groups."""
        last = len(self.groups) if last is None else last
        fixed, moments = self._fixed(first, last), list(self._moments(first, last))
        moment, highest = max(moments, key=lambda moment: sum(moment[1].values()))
        alone = () if self.settings.engine else ("gradient buckets", "gathered weights")
        names, parts = [name for name in COMPONENTS if name not in alone], highest | fixed
        return Peak(
            nbytes=sum(parts.values()),
            moment=moment,
            parts={name: parts.get(name, 0) for name in names},
            largest={n: max(parts.get(n, 0) for _, parts in moments) for n in names} | fixed,
            paged=self._states(first, last)[1],
        )

    def spans(self, capacities: Sequence[int]) -> list[tuple[int, int]]:
        """Return the groups [first, last) of each device: even, or all for ranks of an engine."""
        if len(capacities) > 1 and not self.settings.engine:
            return partition(len(self.groups), capacities, cache(self.nbytes))
        return [(0, len(self.groups))] * len(capacities)

    def spread(self, capacities: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return the blocks on devices of these bytes."""
        uses, peak_of = [], cache(self.peak)
        for index, (first, last) in enumerate(self.spans(capacities)):
            names = [block.name for group in self.groups[first:last] for block in group]
            peak = peak_of(first, last) if names else None
            reserve = 0 if peak is None else reserve_nbytes(peak.nbytes)
            blocks = () if self.settings.engine else tuple(names)
            uses.append(DeviceUse(index, capacities[index], peak, reserve, blocks))
        return tuple(uses)

    def _states(self, first: int, last: int) -> tuple[int, int, int]:
        sizes = [n for group in self.groups[first:last] for block in group for n in block.trained]
        name = self.settings.optimizer
        return optimizer_nbytes(name, sizes, self.itemsize, foreach=self.foreach)

    def _fixed(self, first: int, last: int) -> dict[str, int]:
        blocks = [block for group in self.groups[first:last] for block in group]
        fixed = {
            **{name: sum(b.nbytes(*parts) for b in blocks) for name, parts in WEIGHTS.items()},
            "adapters": sum(self._own[block.name] for block in blocks),
            "optimizer states": self._states(first, last)[0],
            "library workspace": self.library,
        }
        if self.workspace:
            fixed["decode scratch"] = self.workspace * any(block.slot for block in blocks)
        for name, nbytes in self.extra.items():
            fixed[name] = fixed.get(name, 0) + nbytes
        return fixed

    def _moments(self, first: int, last: int) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield each moment that can be the peak, with its bytes beside the fixed ones."""
        every = sum(self._own[b.name] for group in self.groups[first:last] for b in group)
        step = self._states(first, last)[2]
        yield "the optimizer's step", {"gradients": every, "optimizer step": step}
        accumulates = self.settings.accumulation > 1
        saved, later = 0, every
        for activity in self.activities:
            if not first <= self._place.get(activity.name, -1) < last:
                continue
            later -= self._own[activity.name]
            before, after = (every, every) if accumulates else (0, later)
            at_work = "layer at work" if activity is not self.activities[-1] else "logits and loss"
            for phase, work, gradients, gathered in (
                ("forward", activity.forward, before, activity.gathered),
                ("backward", activity.backward, after, activity.gathered + activity.reduced),
            ):
                parts = {"kept activations": saved, "gradients": gradients, at_work: work}
                yield f"{phase} of {activity.name}", parts | {"gathered weights": gathered}
            saved += activity.saved


def partition(
    count: int, capacities: Sequence[int], load: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Spread the blocks 0 .. count - 1 over devices in order, so that the fullest is least full.

    `load` gives the bytes of the blocks [first, last) on one device, and must not fall when a block
    is added. Returns (first, last) for each device.
    """

    def filled(fullness: float) -> list[tuple[int, int]]:
        spans, first = [], 0
        for size in capacities:
            ends = range(first + 1, count + 1)
            last = first + bisect_right(ends, size * fullness, key=partial(load, first))
            spans.append((first, last))
            first = last
        return spans

    low, high = 0.0, 1.000001 * load(0, count) / max(capacities)
    for _ in range(32):  # Halvings of the interval of the fullest device's fullness
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle)[-1][1] == count else (middle, high)
    return filled(high)
