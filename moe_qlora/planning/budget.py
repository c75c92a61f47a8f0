"""The peak of a training step from the memory of its blocks; pure arithmetic, no torch.

A block is what a device map places whole: a decoder layer, an embedding, the head. A step has three
moments that can be its peak on a device, with K(b) the bytes that the blocks before b have saved:

    a block's forward       K(b) + forward(b)
    a block's backward      K(b) + backward(b) + gradients of the blocks after b
    the optimizer's step    all gradients + what the step needs for a moment

each on top of weights, statistics, adapters and optimizer states. With a vocabulary of 100,000 and
more it is the backward of the head's block, which the loss belongs to: the 16-bit logits are gone
by then, but three float32 tensors of their size are there (the log-probabilities that forward kept,
the loss's gradient for them, and that of the logits).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from ..kernels.limits import cdiv
from .devices import partition, reserve_nbytes

LIBRARY_BYTES = 64 << 20
"""cuBLAS workspaces, which torch takes from its own allocator: 32 MiB on Hopper for each of the two
threads that multiply, forward's and backward's."""

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")

ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}
"""Other names that transformers' Trainer has for these."""

_FLOAT32 = 4
# bitsandbytes' own limits: weights to a block of statistics, and the smallest tensor whose moments
# are kept in 8 bit, and in pages.
_BLOCK = 256
_SMALLEST_8BIT = 4096
_SMALLEST_PAGED = 100_000

COMPONENTS = (
    "packed experts",
    "packed Linear layers",
    "other weights",
    "quantization statistics",
    "adapters",
    "optimizer states",
    "library workspace",
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

WEIGHTS = dict(zip(COMPONENTS, ("experts", "linear", "other", "statistics"), strict=False))
"""Those of them that are weights, with the part of a `BlockTensor`."""

ENGINE_COMPONENTS = ("gradient buckets", "gathered weights")
"""Those of them that only a run of several ranks has."""

ENGINES = {"ddp": "DDP", "fsdp": "FSDP2"}
"""The engines by the names that `plan` takes."""

_ONE_PROCESS = tuple(name for name in COMPONENTS if name not in ENGINE_COMPONENTS)


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
        if self.name != "fsdp" or not tensor.parameter:
            return tensor
        return replace(tensor, rows=cdiv(tensor.rows, self.ranks))

    def on_rank(self, block: Block) -> Block:
        """Return what one rank holds of a block."""
        tensors = tuple(map(self._on_rank, block.tensors))
        statistics = sum(t.numel * t.itemsize for t in tensors if t.part == "statistics")
        return replace(block, tensors=tensors, statistics=statistics)

    def with_gathered(
        self, activities: Sequence[Activity], blocks: Mapping[str, Block]
    ) -> tuple[Activity, ...]:
        """Return activities, in running order, with what is gathered while each goes on.

        `blocks` are those of the whole model, by name.
        """
        if self.name != "fsdp":
            return tuple(activities)

        def gathered_nbytes(block: Block, *parts: str) -> int:
            # With padding; buffers were never cut.
            cut = [t for t in block.tensors if t.parameter and (not parts or t.part in parts)]
            return self.ranks * sum(t.numel * t.itemsize for t in map(self._on_rank, cut))

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

    def buffers(self, blocks: Iterable[Block], itemsize: int) -> dict[str, int]:
        """Return the bytes that the engine itself holds at any time, by component.

        `blocks` are those of the whole model; `itemsize` is that of the adapters.
        """
        if self.name == "fsdp":
            return {}
        trained = (t for block in blocks for t in block.tensors if t.part == "trained")
        return {"gradient buckets": sum(t.numel for t in trained) * itemsize}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is to be trained."""

    batch: int = 1
    seq: int = 4096
    rank: int = 16  # LoRA rank r
    targets: str = "attention"  # As of `plan`
    adapter_dtype: str = "float32"  # "float32" (what `get_peft_model` gives) or "bfloat16"
    optimizer: str = "adamw"  # One of `OPTIMIZERS`
    foreach: bool = True  # Whether AdamW's step takes all weights at once, as it does on CUDA
    checkpointing: bool = True  # Whether layers are computed again in backward
    accumulation: int = 1  # Micro-batches to a step; over 1, gradients live through all of them
    workspace: int = 0  # Bytes of dequantized experts that all layers of a device share
    attention: str | None = None  # As `attn_implementation`; None is what the model says
    prepared: bool = False  # Whether the loss is computed in Liger's chunks, without all logits
    engine: Engine | None = None  # None in one process, spread over devices or not
    offload: bool = False  # Whether packed experts lie in host memory


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """One tensor that a block holds, as an engine may split it."""

    part: str  # "experts", "linear", "statistics", "trained" or "other"
    rows: int  # Size of its first dimension
    row_numel: int  # Elements in a row
    itemsize: int
    parameter: bool = True  # A buffer is never split

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.row_numel


@dataclass(frozen=True)
class Block:
    """The weights of one block."""

    name: str
    tensors: tuple[BlockTensor, ...] = ()
    statistics: int = 0  # Bytes of quantization statistics, which runs of several ranks may pad
    expert_statistics: int = 0  # Those of packed experts
    dequantized: int = 0  # Bytes of the largest weight that is dequantized at once
    layer: bool = False  # Whether it is a decoder layer, which engines gather as one
    slot: int = 0  # Bytes of packed experts with statistics in a slot of `hosting.py`
    active: int = 0  # Weights that one token is multiplied with

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of the tensors of each part."""
        sizes = dict.fromkeys(WEIGHTS.values(), 0) | {"trained": 0}
        for tensor in self.tensors:
            sizes[tensor.part] += tensor.numel * tensor.itemsize
        return sizes | {"statistics": self.statistics}

    @property
    def trained(self) -> tuple[int, ...]:
        """Number of weights of each trained tensor."""
        return tuple(tensor.numel for tensor in self.tensors if tensor.part == "trained")

    @property
    def weights(self) -> int:
        """Bytes of the packed block without adapters."""
        return sum(self.parts[part] for part in WEIGHTS.values())

    def without_experts(self) -> Block:
        """Return the block with its packed experts in host memory."""
        rest = self.statistics - self.expert_statistics
        tensors = tuple(tensor for tensor in self.tensors if tensor.part != "experts")
        return replace(self, tensors=tensors, statistics=rest, expert_statistics=0)


@dataclass(frozen=True, slots=True)
class Activity:
    """The memory of one block in a step, in bytes; see `meta_step`."""

    name: str
    saved: int  # Saved by its forward for its backward
    forward: int  # The most in its forward, beyond what was alive when it started
    backward: int  # The most in its backward, beyond the same and the gradients that came later
    gathered: int = 0  # Other ranks' shares that an engine gathers meanwhile
    reduced: int = 0  # In backward also: gradients on their way to all ranks


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
        # The step takes the root of all second moments at once (torch's foreach implementation),
        # or of one after the other: the root, its quotient, and that of the weight before.
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


class StepBudget:
    """The memory of any run of neighbouring blocks on one device in a training step.

    The blocks of a group must share a device; groups come in placing order, activities in running
    order, and the loss belongs to the last. `itemsize` is that of the adapters. `extra` are bytes
    of an engine's own that are there at any time, by component, and `library` those of libraries'
    workspaces.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Block]],
        activities: Sequence[Activity],
        settings: Settings,
        itemsize: int,
        *,
        extra: Mapping[str, int] | None = None,
        library: int = LIBRARY_BYTES,
    ) -> None:
        self.groups = groups
        self.settings = settings
        self.extra, self.library = dict(extra or {}), library
        self.components = COMPONENTS if settings.engine else _ONE_PROCESS
        self.last = activities[-1].name if activities else ""
        self._states = [
            optimizer_nbytes(
                settings.optimizer,
                [n for b in group for n in b.trained],
                itemsize,
                foreach=settings.foreach,
            )
            for group in groups
        ]
        self._blocks = {block.name: block for group in groups for block in group}
        self._own = {name: itemsize * sum(b.trained) for name, b in self._blocks.items()}
        self._gradients = [sum(self._own[block.name] for block in group) for group in groups]
        place = {block.name: index for index, group in enumerate(groups) for block in group}
        self._run = [(place[a.name], a) for a in activities if a.name in place]

    def nbytes(self, first: int, last: int) -> int:
        """Return the peak of the groups [first, last) on one device."""
        highest = max(sum(parts.values()) for _, parts in self._moments(first, last))
        return sum(self._fixed(first, last).values()) + highest

    def peak(self, first: int = 0, last: int | None = None) -> Peak:
        """Return the same with its parts, by default of all groups."""
        last = len(self.groups) if last is None else last
        fixed, moments = self._fixed(first, last), list(self._moments(first, last))
        moment, highest = max(moments, key=lambda moment: sum(moment[1].values()))
        names, parts = self.components, highest | fixed
        return Peak(
            nbytes=sum(parts.values()),
            moment=moment,
            parts={name: parts.get(name, 0) for name in names},
            largest={n: max(parts.get(n, 0) for _, parts in moments) for n in names} | fixed,
            paged=sum(paged for _, paged, _ in self._states[first:last]),
        )

    def spread(self, capacities: Sequence[int]) -> tuple[DeviceUse, ...]:
        """Return the blocks on devices of these bytes: even, or as ranks of an engine have them."""
        spans = [(0, len(self.groups))] * len(capacities)
        if len(capacities) > 1 and not self.settings.engine:
            spans = partition(len(self.groups), capacities, cache(self.nbytes))
        uses, peak_of = [], cache(self.peak)
        for index, (capacity, (first, last)) in enumerate(zip(capacities, spans, strict=True)):
            names = [block.name for group in self.groups[first:last] for block in group]
            peak = peak_of(first, last) if names else None
            reserve = 0 if peak is None else reserve_nbytes(peak.nbytes)
            blocks = () if self.settings.engine else tuple(names)
            uses.append(DeviceUse(index, capacity, peak, reserve, blocks))
        return tuple(uses)

    def peaks_on(self, uses: Sequence[DeviceUse]) -> list[int]:
        """Return the peak of each device that holds the blocks of an earlier budget, 0 for none."""
        peaks, first, last = [], 0, len(self.groups)
        for use in uses:
            if not self.settings.engine:
                last = first + sum(group[0].name in use.blocks for group in self.groups)
            peaks.append(self.nbytes(first, last) if first < last else 0)
            first = 0 if self.settings.engine else last
        return peaks

    def _fixed(self, first: int, last: int) -> dict[str, int]:
        blocks = [block for group in self.groups[first:last] for block in group]
        fixed = {
            **{name: sum(b.parts[part] for b in blocks) for name, part in WEIGHTS.items()},
            "adapters": sum(self._gradients[first:last]),
            "optimizer states": sum(resident for resident, _, _ in self._states[first:last]),
            "library workspace": self.library,
        }
        if self.settings.workspace:
            packed = any(b.parts["experts"] or b.slot for b in blocks)
            fixed["decode scratch"] = self.settings.workspace * packed
        for name, nbytes in self.extra.items():
            fixed[name] = fixed.get(name, 0) + nbytes
        return fixed

    def _moments(self, first: int, last: int) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield each moment that can be the peak, with its bytes beside the fixed ones."""
        every = sum(self._gradients[first:last])
        steps = [step for _, _, step in self._states[first:last]]
        step = sum(steps) if self.settings.foreach else max(steps, default=0)
        yield "the optimizer's step", {"gradients": every, "optimizer step": step}
        accumulates = self.settings.accumulation > 1
        saved, later = 0, every
        for index, activity in self._run:
            if not first <= index < last:
                continue
            later -= self._own[activity.name]
            before, after = (every, every) if accumulates else (0, later)
            for phase, work, gradients, gathered in (
                ("forward", activity.forward, before, activity.gathered),
                ("backward", activity.backward, after, activity.gathered + activity.reduced),
            ):
                parts = {"kept activations": saved, "gradients": gradients}
                parts["gathered weights"] = gathered
                if activity.name == self.last:
                    parts["logits and loss"] = work
                else:
                    dequantized = 0
                    if not self.settings.workspace:
                        dequantized = min(self._blocks[activity.name].dequantized, work)
                    parts["layer at work"] = work - dequantized
                    parts["decode scratch"] = dequantized
                yield f"{phase} of {activity.name}", parts
            saved += activity.saved
