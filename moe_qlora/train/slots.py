"""Slots on a device, each with a copy of one block of host memory, filled ahead of its use.

A block has `memory`, uint8 `(bytes,)`, and `place`, in the order of use.

`Slots.fetch` returns the slot of a block and a `Lease`. As long as the lease is referenced, the
slot keeps its block; a later copy to it waits for what the device was given to compute until the
lease's end. So an exception cannot leave a slot taken: where a traceback keeps a lease, another
block of the same slot gets memory of its own.

A block always has the same slot, by its place in the order of use: a CUDA graph that was recorded
with a lease of the block reads its address, and is replayed within another lease. With two slots,
neighbours in that order are in different ones, forwards as well as backwards.

    compute stream   | wait for ready | kernels that read the slot | mark |
    copy stream                                                           | wait for mark | copy |
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor


class _AtOnce:
    """A CPU as a stream and as its events: work is complete when it is submitted."""

    def record_event(self) -> _AtOnce:
        return self

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Copier:
    """Copies from host memory to one device, on a stream of its own; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if self.on_cuda else _AtOnce()

    def here(self) -> Any:
        """Return the stream that the caller computes on."""
        return torch.cuda.current_stream(self.device) if self.on_cuda else self.stream

    def records(self) -> bool:
        """Return True while the caller's stream is captured as a CUDA graph."""
        return self.on_cuda and torch.cuda.is_current_stream_capturing()

    def empty(self, nbytes: int) -> Tensor:
        """Return memory of the device, uint8 `(nbytes,)`, to copy to."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.on_cuda:
            # When it is freed, torch gives it to nobody before the copies to it are done.
            memory.record_stream(self.stream)
        return memory

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        """Copy once all events of `after` have come; return the event that it is done."""
        with torch.cuda.stream(self.stream) if self.on_cuda else nullcontext():
            for event in after:
                self.stream.wait_event(event)
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()


class DeviceSlot:
    """Memory on the device, and whose copy it holds."""

    def __init__(self, memory: Tensor, stream: Any) -> None:
        self.memory = memory
        self.block: Any = None
        self.ready: Any = None  # The event that the last copy to it is done
        # What a copy to it waits for, by stream: the ends of its leases; at first that of what the
        # allocator gave the memory to before
        self.marks: dict[Any, Any] = {stream: stream.record_event()}
        self.leases: set[int] = set()  # Their ids: a set is changed without a lock


class Lease:
    """Keeps a slot as it is, as long as this object is referenced."""

    def __init__(self, slot: DeviceSlot, stream: Any) -> None:
        self.slot, self.stream = slot, stream
        slot.leases.add(id(self))

    def __del__(self) -> None:
        # In any thread, also in the middle of a fetch, where the garbage collector runs. Nothing
        # is copied to the slot before its lease is discarded.
        if not sys.is_finalizing():
            self.slot.marks[self.stream] = self.stream.record_event()
            self.slot.leases.discard(id(self))


class Slots:
    """Some slots of one device."""

    def __init__(self, count: int, nbytes: int, copier: Copier) -> None:
        self.copier, self.copies = copier, 0
        self._count, self._nbytes = count, nbytes
        self._slots: list[DeviceSlot] = []
        self._lock = threading.Lock()

    def fetch(self, block: Any, following: Any | None) -> tuple[DeviceSlot, Lease | None]:
        """Return the slot with a block's copy, and what reserves it; then copy `following`.

        What the caller's stream is given from now on waits for the copy. In the recording of a
        CUDA graph, which runs later, nothing is copied, waited for or reserved.

        Raises:
            RuntimeError: In a recording, the block is not in its slot, or not reserved there.
        """
        if self.copier.records():
            slot = self.slot(block)
            if slot.block is not block or not slot.leases:
                raise RuntimeError(
                    "experts in host memory were read in a CUDA graph that prepare_training does "
                    "not record, which would read them again after remove() has freed them: in "
                    "generate, give disable_compile=True; elsewhere, call remove() on what "
                    "offload_experts returned before recording it"
                )
            return slot, None
        with self._lock:
            slot = home = self.slot(block)
            if slot.block is not block:
                if slot.leases:
                    slot = self._new(block.memory.nbytes)
                self._copy(block, slot)
            stream = self.copier.here()
            stream.wait_event(slot.ready)
            lease = Lease(slot, stream)
            ahead = home if following is None else self.slot(following)
            # A backward may read this block once more.
            if ahead is not home and ahead.block is not following and not ahead.leases:
                self._copy(following, ahead)
        return slot, lease

    def slot(self, block: Any) -> DeviceSlot:
        """Return the slot of a block, whatever it holds now."""
        while len(self._slots) < self._count:
            self._slots.append(self._new(self._nbytes))
        return self._slots[block.place % self._count]

    def forget(self, block: Any | None = None) -> None:
        """Forget copies, of a block or of all, and wait until host memory is not read any more."""
        with self._lock:
            for slot in self._slots:
                if slot.block is not None and (block is None or block is slot.block):
                    with suppress(Exception):  # Of a copy that was not made: nobody needs it now
                        slot.ready.synchronize()
                    slot.block = None

    def _new(self, nbytes: int) -> DeviceSlot:
        with torch.inference_mode(False):  # Else nothing outside could be copied to it
            return DeviceSlot(self.copier.empty(nbytes), self.copier.here())

    def _copy(self, block: Any, slot: DeviceSlot) -> None:
        slot.block = None  # While it is not known whether the copy is under way
        to = slot.memory[: block.memory.nbytes]
        slot.ready = self.copier.copy(to, block.memory, slot.marks.values())
        slot.marks, slot.block = {}, block
        self.copies += 1
