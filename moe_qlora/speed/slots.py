"""Slots on a device, each with a copy of one block of host memory, filled ahead of its use.

A `Slots.fetch` returns the memory of a block's slot and a `Lease`. As long as the lease is
referenced, the slot is not given away. With its end the slot can be filled again, by a copy that
waits for what the device was given to compute until then. So nobody says when a use ends, and an
exception cannot leave a slot taken: where a traceback keeps a lease, another fetch that finds no
free slot gets memory of its own.

    compute stream   | wait for ready | kernels that read the slot | mark |
    copy stream                                                           | wait for mark | copy |

A `Copier` has the stream and events of one device.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Copier(Protocol):
    """Copies from host memory to one device, beside what it computes."""

    def empty(self, nbytes: int) -> Tensor:
        """Return memory of the device, uint8 `(nbytes,)`, to copy to."""

    def here(self) -> Any:
        """Return the stream that the caller computes on."""

    def mark(self, stream: Any) -> Any:
        """Return an event: all that a stream has been given so far is done."""

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        """Copy once all events of `after` have come; return the event that it is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let all that a stream is given from now on wait for an event."""

    def finish(self, event: Any) -> None:
        """Wait for an event here and now."""


class HostCopier:
    """The `Copier` of the CPU, where a copy is done when the call returns."""

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def here(self) -> Any:
        return None

    def mark(self, stream: Any) -> Any:
        return None

    def copy(self, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        to.copy_(source)

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def finish(self, event: Any) -> None:
        pass


class CudaCopier:
    """The `Copier` of a CUDA device, with a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def empty(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # When it is freed, torch gives it to nobody before the copies to it are done.
        memory.record_stream(self.stream)
        return memory

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
    """Some host memory that is copied to a slot as a whole."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # `(bytes,)` uint8


class Slot:
    """Memory on the device, and whose copy it holds."""

    def __init__(self, memory: Tensor, stream: Any, mark: Any) -> None:
        self.memory = memory
        self.block: Block | None = None
        self.ready: Any = None  # The event that the last copy to it is done
        # What a copy to it waits for, by stream: the ends of its leases; at first that of what the
        # allocator gave the memory to before
        self.marks: dict[Any, Any] = {stream: mark}
        self.leases = 0
        self.touched = 0  # Number of the last fetch or copy


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
        self._time = 0

    def fetch(self, block: Block, following: Block | None) -> tuple[Slot, Lease]:
        """Return the slot with a block's copy, and what reserves it; then copy `following`.

        What the caller's stream is given from now on waits for the copy.
        """
        with self._lock:
            self._settle()
            slot = self._slot_of(block)
            if slot is None:
                slot = self._free(keeps=None) or self._new(block.memory.nbytes)
                self._copy(block, slot)
            stream = self.copier.here()
            self.copier.wait(stream, slot.ready)
            lease = Lease(self, slot, stream)
            slot.touched = self._tick()
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
                    self.copier.finish(slot.ready)
                    slot.block = None

    def finish(self) -> None:
        """Wait until no host memory is read any more."""
        with self._lock:
            self._wanted = None
            for slot in self._slots:
                if slot.block is not None:
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

    def _slot_of(self, block: Block) -> Slot | None:
        return next((slot for slot in self._slots if slot.block is block), None)

    def _free(self, keeps: Block | None) -> Slot | None:
        """Return the slot to fill next: nobody has a lease of it, nor is it that of `keeps`."""
        if len(self._slots) < self.count:
            self._slots.append(self._new(self._nbytes))
            return self._slots[-1]
        free = [s for s in self._slots if not s.leases and (keeps is None or s.block is not keeps)]
        return min(free, key=lambda slot: slot.touched, default=None)

    def _new(self, nbytes: int) -> Slot:
        with torch.inference_mode(False):  # Else nothing outside could be copied to it
            stream = self.copier.here()
            return Slot(self.copier.empty(nbytes), stream, self.copier.mark(stream))

    def _copy_ahead(self) -> None:
        """Copy the block that is wanted next, as soon as a slot is free for it."""
        block = self._wanted
        if block is None:
            return
        if self._slot_of(block) is None:
            slot = self._free(keeps=self._current)
            if slot is None:
                return
            self._copy(block, slot)
        self._wanted = None

    def _copy(self, block: Block, slot: Slot) -> None:
        slot.block = None  # While it is not known whether the copy is under way
        to = slot.memory[: block.memory.nbytes]
        slot.ready = self.copier.copy(to, block.memory, slot.marks.values())
        slot.marks = {}
        slot.block, slot.touched = block, self._tick()
        self.copies += 1

    def _tick(self) -> int:
        self._time += 1
        return self._time
