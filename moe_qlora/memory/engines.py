"""The memory of a rank of a run on many GPUs, by engine; plain arithmetic, free of torch.

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
    ep     Expert parallelism: E / N whole experts and their LoRA on each rank, the rest whole on
           each, its gradients through DDP's buckets. Tokens travel to the experts by two all-to-all
           in forward and two in backward. Counted as transformers' `AllToAllEP` computes
           (`meta_ops.dispatched`), every rank getting as many rows as it sends.
    zero3  DeepSpeed ZeRO-3. Each parameter is flattened and cut into N parts, padded, but for
           those of at most 10 H elements (H: hidden size), which stay whole. Modules are gathered
           one by one, and kept where they are needed again within 10**9 elements: counted is the
           longest run of blocks within that, and never less than one block. Without checkpointing
           autograd keeps all that is not packed; packed weights are free after their forward, and
           gathered anew for backward. There is a reduce bucket of H**2 elements and a buffer for
           the sums of gradients; adapters that are not in float32 have a float32 copy, and moments
           of it. 10 H and H**2 are what transformers puts for "auto" (and 0.9 H**2 elements for
           prefetching, which are within the 10**9).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..kernels.limits import cdiv
from .budget import Activity, Block, BlockTensor, Engine

ENGINES = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "ep": "expert parallelism",
    "zero3": "DeepSpeed ZeRO-3",
}
"""The engines by the arguments of `plan` that ask for them."""

REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's default of `stage3_max_reuse_distance`, in elements; no "auto" changes it."""

_FLOAT32 = 4
_PACKED = ("experts", "linear", "statistics")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an engine cuts the tensors of one model."""

    engine: Engine
    hidden: int  # The model's hidden size, from which DeepSpeed's sizes are filled in

    def share(self, tensor: BlockTensor) -> int:
        """Return how many elements of a tensor a rank holds."""
        if not self._cuts(tensor):
            return tensor.numel
        if self.engine.name == "fsdp":
            return cdiv(tensor.rows, self.engine.ranks) * tensor.row_numel
        return cdiv(tensor.numel, self.engine.ranks)

    def whole(self, tensor: BlockTensor) -> int:
        """Return the bytes of a gathered tensor, padding included; 0 where it was never cut."""
        cut = self._cuts(tensor)
        return self.share(tensor) * self.engine.ranks * tensor.itemsize if cut else 0

    def _cuts(self, tensor: BlockTensor) -> bool:
        persistent = self.engine.name == "zero3" and tensor.numel <= 10 * self.hidden
        return self.engine.name in ("fsdp", "zero3") and tensor.parameter and not persistent

    def on_rank(self, block: Block) -> Block:
        """Return what one rank holds of a block."""
        sizes = dict.fromkeys(("experts", "linear", "other", "statistics"), 0)
        trained = []
        for tensor in block.tensors:
            if tensor.part == "trained":
                trained.append(self.share(tensor))
            else:
                sizes[tensor.part] += self.share(tensor) * tensor.itemsize
        return replace(block, trained=tuple(trained), **cast(Any, sizes))

    def with_gathered(
        self,
        activities: Sequence[Activity],
        blocks: Mapping[str, Block],
        *,
        checkpointing: bool,
        kept: Collection[str] = (),
    ) -> tuple[Activity, ...]:
        """Return activities, in running order, with what is gathered while each goes on.

        `blocks` are those of the whole model, by name; those in `kept`, and all of them without
        checkpointing, compute nothing again.
        """
        whole = {
            name: sum(self.whole(tensor) for tensor in block.tensors)
            for name, block in blocks.items()
        }
        if self.engine.name == "fsdp":
            return tuple(self._fsdp(activities, blocks, whole))
        if self.engine.name != "zero3":
            return tuple(activities)
        saved = 0  # by autograd, of all blocks
        for name in kept if checkpointing else blocks:
            saved += whole[name] - (packed := self._packed(blocks[name]))
            whole[name] = packed
        return tuple(
            replace(activity, gathered=activity.gathered + saved)
            for activity in _zero3(activities, blocks, whole)
        )

    def _packed(self, block: Block) -> int:
        """Return the bytes of a block's packed weights where they are gathered."""
        return sum(self.whole(tensor) for tensor in block.tensors if tensor.part in _PACKED)

    def _fsdp(
        self,
        activities: Sequence[Activity],
        blocks: Mapping[str, Block],
        whole: Mapping[str, int],
    ) -> Iterator[Activity]:
        root = sum(size for name, size in whole.items() if not blocks[name].layer)
        layers = [whole[a.name] if blocks[a.name].layer else 0 for a in activities]
        trained = [
            sum(self.whole(t) for t in blocks[a.name].tensors if t.part == "trained")
            for a in activities
        ]
        for place, activity in enumerate(activities):
            before = next((size for size in reversed(layers[:place]) if size), 0)
            after = next((size for size in layers[place + 1 :] if size), 0)
            # The root's own are copied out of a buffer as large, which the first layer's frees.
            buffer = root if place == 0 else max(before, layers[place], after)
            yield replace(
                activity,
                gathered=root + layers[place] + buffer,
                reduced=max(trained[place : place + 2]),
            )

    def buffers(self, blocks: Iterable[Block], itemsize: int) -> dict[str, int]:
        """Return the bytes that the engine itself holds at any time, by component.

        `blocks` are those of the whole model, or a rank's own experts; `itemsize` is that of the
        adapters.
        """
        trained = [t for block in blocks for t in block.tensors if t.part == "trained"]
        if self.engine.name == "zero3":
            copies = 0 if itemsize == _FLOAT32 else _FLOAT32 * sum(map(self.share, trained))
            return {"gradient buckets": self.hidden**2 * itemsize, "optimizer states": copies}
        if self.engine.name == "fsdp":
            return {}
        reduced = [t for t in trained if self.engine.name == "ddp" or not t.of_experts]
        return {"gradient buckets": sum(tensor.numel for tensor in reduced) * itemsize}


def _zero3(
    activities: Sequence[Activity], blocks: Mapping[str, Block], whole: Mapping[str, int]
) -> list[Activity]:
    """Count, for each block, the most that a run of blocks within the reuse distance has."""
    sizes = [whole[activity.name] for activity in activities]
    numels = [
        sum(tensor.numel for tensor in blocks[activity.name].tensors if tensor.parameter)
        for activity in activities
    ]
    most = [0] * len(activities)
    last = held = elements = 0
    for first in range(len(activities)):
        last = max(last, first)
        while last < len(activities) and (
            last == first or elements + numels[last] <= REUSE_DISTANCE
        ):
            held, elements, last = held + sizes[last], elements + numels[last], last + 1
        for place in range(first, last):
            most[place] = max(most[place], held)
        held, elements = held - sizes[first], elements - numels[first]
    return [replace(a, gathered=size) for a, size in zip(activities, most, strict=True)]
