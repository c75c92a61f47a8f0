"""Slots on a device, each with a copy of one block of host memory, filled ahead of its use.

A `Slots.fetch` returns the memory of a block's slot and a `Lease`. As long as the lease is
referenced, the slot is not given away. With its end the slot can be filled again, by a copy that
waits for what the device was given to compute until then. So nobody says when a use ends, and an
exception cannot leave a slot taken: where a traceback keeps a lease, another block that would be
in the same slot gets memory of its own.

A block always has the same slot, by its place in the order of use: a CUDA graph that was recorded
with a lease of the block reads its address, and is replayed within another lease. With two slots,
neighbours in that order are in different ones, forwards as well as backwards.

    compute stream   | wait for ready | kernels that read the slot | mark |
    copy stream                                                           | wait for mark | copy |

A `Copier` has the stream and events of one device.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class Copier:
    """Copies from host memory to one device, beside what it computes; this one to the CPU's own.

    There, a copy is done when the call returns.
    """

    device = torch.device("cpu")

    def empty(self, nbytes: int) -> Tensor:
        """Return memory of the device, uint8 `(nbytes,)`, to copy to."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def records(self) -> bool:
        """Whether what the caller computes is recorded as a CUDA graph, and does not run."""
        return False

    def here(self) -> Any:
        """Return the stream that the caller computes on."""

    def mark(self, stream: Any) -> Any:
        """Return an event: all that a stream has been given so far is done."""

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        """Copy once all events of `after` have come; return the event that it is done."""
        to.copy_(source)

    def wait(self, stream: Any, event: Any) -> None:
        """Let all that a stream is given from now on wait for an event."""

    def finish(self, event: Any) -> None:
        """Wait for an event here and now."""


class CudaCopier(Copier):
    """The `Copier` of a CUDA device, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def empty(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # When it is freed, torch gives it to nobody before the copies to it are done.
        memory.record_stream(self.stream)
        return memory

    def records(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def here(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def mark(self, stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        with torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            to.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def finish(self, event: Any) -> None:
        event.synchronize()


class Block:
    """What is copied to a slot as a whole: some host memory, or what a subclass reads."""

    def __init__(self, memory: Tensor, place: int) -> None:
        self.memory = memory  # `(bytes,)` uint8
        self.place = place  # In the order of use; modulo the number of slots, that of its slot

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def fill(self, to: Tensor, copier: Copier, after: Iterable[Any]) -> Any:
        """Copy once all events of `after` have come; return the event that it is done."""
        return copier.copy(to, self.memory, after)


class Slot:
    """Memory on the device, and whose copy it holds."""

    def __init__(self, memory: Tensor, stream: Any, mark: Any, stays: bool) -> None:
        self.memory, self.stays = memory, stays  # Or it is gone with its lease
        self.block: Block | None = None
        self.ready: Any = None  # The event that the last copy to it is done
        # What a copy to it waits for, by stream: the ends of its leases; at first that of what the
        # allocator gave the memory to before
        self.marks: dict[Any, Any] = {stream: mark}
        self.leases = 0


class Lease:
    """Keeps a slot as it is, as long as this object is referenced."""

    def __init__(self, slots: Slots, slot: Slot, stream: Any) -> None:
        self.slots, self.slot, self.stream = slots, slot, stream
        slot.leases += 1

    def __del__(self) -> None:
        # Here or in any other code that drops the last reference, also in the middle of a fetch.
        if not sys.is_finalizing():
            self.slots.end(self.slot, self.stream)


class Slots:
    """Some slots of one device."""

    def __init__(self, count: int, nbytes: int, copier: Copier) -> None:
        self.copier, self.copies, self.count = copier, 0, count
        self._nbytes = nbytes
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        self._ended: deque[tuple[Slot, Any, Any]] = deque()
        self._current: Block | None = None
        self._wanted: Block | None = None  # The block to copy next

    def fetch(self, block: Block, following: Block | None) -> tuple[Slot, Lease | None]:
        """Return the slot with a block's copy, and what reserves it; then copy `following`.

        What the caller's stream is given from now on waits for the copy. In the recording of a
        CUDA graph, which runs later, nothing is copied, waited for or reserved.

        Raises:
            RuntimeError: In a recording, the block is not in its slot, or not reserved there.
        """
        if self.copier.records():
            slot = self._slot(block)
            if slot.block is not block or not slot.leases:
                raise RuntimeError(
                    "experts in host memory were read in a CUDA graph that graph_layers does not "
                    "record, which would read them again after remove() has freed them: in "
                    "generate, give disable_compile=True; elsewhere, call remove() on what "
                    "offload_experts returned before recording it"
                )
            return slot, None
        with self._lock:
            self._settle()
            slot = self._slot(block)
            if slot.block is not block:
                if slot.leases:
                    slot = self._new(block.nbytes, stays=False)
                self._copy(block, slot)
            stream = self.copier.here()
            self.copier.wait(stream, slot.ready)
            lease = Lease(self, slot, stream)
            self._current, self._wanted = block, following
            self._copy_ahead()
        self._catch_up()
        return slot, lease

    def end(self, slot: Slot, stream: Any) -> None:
        """Note the end of a lease on a stream; may be called at any time, in any thread."""
        self._ended.append((slot, stream, self.copier.mark(stream)))
        self._catch_up()

    def forget(self, block: Block) -> None:
        """Forget a block's copies, and wait until its memory is not read any more."""
        with self._lock:
            for slot in self._slots:
                if slot.block is block:
                    self._finish(slot)
                    slot.block = None

    def finish(self) -> None:
        """Wait until no host memory is read any more."""
        with self._lock:
            self._wanted = None
            for slot in self._slots:
                if slot.block is not None:
                    self._finish(slot)

    def _finish(self, slot: Slot) -> None:
        with suppress(Exception):  # Of a copy that was not made: nobody needs it now
            self.copier.finish(slot.ready)

    def _catch_up(self) -> None:
        """Treat leases that have ended, unless another call does, which then sees these too."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._settle()
                self._copy_ahead()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._ended:
            slot, stream, mark = self._ended.popleft()
            slot.leases -= 1
            slot.marks[stream] = mark

    def _slot(self, block: Block) -> Slot:
        while len(self._slots) < self.count:
            self._slots.append(self._new(self._nbytes, stays=True))
        return self._slots[block.place % self.count]

    def _new(self, nbytes: int, stays: bool) -> Slot:
        with torch.inference_mode(False):  # Else nothing outside could be copied to it
            stream = self.copier.here()
            return Slot(self.copier.empty(nbytes), stream, self.copier.mark(stream), stays)

    def _copy_ahead(self) -> None:
        block = self._wanted
        if block is None:
            return
        slot = self._slot(block)
        if slot.block is not block:
            if slot.leases or slot.block is self._current:  # which may be read once more
                return
            self._copy(block, slot)
        self._wanted = None

    def _copy(self, block: Block, slot: Slot) -> None:
        slot.block = None  # While it is not known whether the copy is under way
        to = slot.memory[: block.nbytes]
        slot.ready = block.fill(to, self.copier, slot.marks.values())
        slot.marks = {}
        slot.block = block
        self.copies += 1
