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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..kernels.limits import cdiv
from .budget import Activity, Block, BlockTensor, Engine

ENGINES = {"ddp": "DDP", "fsdp": "FSDP2"}
"""The engines by the arguments of `plan` that ask for them."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an engine cuts the tensors of one model."""

    engine: Engine

    def share(self, tensor: BlockTensor) -> int:
        """Return how many elements of a tensor a rank holds."""
        if not self._cuts(tensor):
            return tensor.numel
        return cdiv(tensor.rows, self.engine.ranks) * tensor.row_numel

    def whole(self, tensor: BlockTensor) -> int:
        """Return the bytes of a gathered tensor, padding included; 0 where it was never cut."""
        cut = self._cuts(tensor)
        return self.share(tensor) * self.engine.ranks * tensor.itemsize if cut else 0

    def _cuts(self, tensor: BlockTensor) -> bool:
        return self.engine.name == "fsdp" and tensor.parameter

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
        self, activities: Sequence[Activity], blocks: Mapping[str, Block]
    ) -> tuple[Activity, ...]:
        """Return activities, in running order, with what is gathered while each goes on.

        `blocks` are those of the whole model, by name.
        """
        if self.engine.name != "fsdp":
            return tuple(activities)
        whole = {
            name: sum(self.whole(tensor) for tensor in block.tensors)
            for name, block in blocks.items()
        }
        return tuple(self._fsdp(activities, blocks, whole))

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

        `blocks` are those of the whole model; `itemsize` is that of the adapters.
        """
        if self.engine.name == "fsdp":
            return {}
        trained = (t for block in blocks for t in block.tensors if t.part == "trained")
        return {"gradient buckets": sum(t.numel for t in trained) * itemsize}
