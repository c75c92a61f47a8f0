"""A second stream in CUDA graphs, on which small kernels run beside large ones.

A layer's products with LoRA's factors, and the gradients of these, wait for memory or fill a part
of the multiprocessors, and the large products beside them do not need their results yet. A graph
replays both at once, for none of the host's time. Outside of a graph all kernels stay on one
stream, since changing streams takes the host longer than these kernels run.

What nothing in a recording reads, such as gradients of weights, need not be done when an operator
returns: within `leaving`, it may be left to run beside what other operators launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_LEAST_ROWS = 1024
"""With fewer rows, kernels end about as soon as another branch begins."""


class SecondStream:
    """A branch of the CUDA graph that is being recorded on a device; without one, the same stream.

    Every branch has to be joined, or left, before the operator that made it returns.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        many = rows >= _LEAST_ROWS and device.type == "cuda"
        records = many and torch.cuda.is_current_stream_capturing()
        self._stream = _stream(device) if records else None
        self._left = _leaving.get(device)
        self._read: list[Tensor] = []
        self._waiting: list[Callable[[], object]] = []
        self._from: torch.cuda.Event | None = None  # Where the first stream was before these
        self._mark: torch.cuda.Event | None = None
        self._read_before = 0  # How many of `_read` are read before it alone
        self._runs = False

    @property
    def leaves(self) -> bool:
        """Whether `leave` leaves kernels to run on, which then may read no operator's arguments."""
        return self._left is not None and self._stream is not None

    def soon(self, launch: Callable[[], object], *read: Tensor) -> None:
        """Launch kernels at `start`, to run beside what the first stream launches before that.

        A graph starts what was launched first, so that short kernels others wait for come before
        long ones. Allocate what they write before.

        Args:
            launch: Launches them.
            read: Tensors that they read and that the caller may drop before `join`.
        """
        if self._stream is None:
            launch()
            return
        self._read += read
        self._waiting.append(launch)
        self._from = torch.cuda.current_stream(self._stream.device).record_event()

    def start(self) -> None:
        """Launch what waits for it."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._stream is not None and self._from is not None:
            self._stream.wait_event(self._from)
            self._runs = True
            with torch.cuda.stream(self._stream):
                for launch in waiting:
                    launch()

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """Run the block's kernels after all before it, and beside those after it, until `join`.

        Allocate what they write before: memory belongs to the stream that it is allocated on.

        Args:
            read: Tensors that they read and that the caller may drop before `join`.
        """
        if self._stream is None:
            yield
            return
        self.start()
        self._read += read
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._runs = True
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Run the block's kernels on the first stream, after `join`."""
        self.join()
        yield

    def join(self) -> None:
        """Let what follows wait for the kernels beside."""
        self.start()
        if self._runs and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._runs = False
            if self._left is not None:  # They ran on the same stream, before
                self._left.held.clear()
        self._read.clear()

    def mark(self) -> None:
        """Let `leave` wait for the kernels up to here, and leave those after it."""
        if self.leaves and self._stream is not None:
            self._mark, self._read_before = self._stream.record_event(), len(self._read)

    def leave(self, outputs: Iterable[Tensor | None]) -> None:
        """Join up to `mark`; the rest runs on, if that is allowed, and is joined later.

        Args:
            outputs: What the rest writes, for the recording's end alone to read.
        """
        if self._left is not None:
            self._left.outputs += [out for out in outputs if out is not None]
        if not self.leaves or self._stream is None or self._mark is None or self._left is None:
            self.join()
            return
        torch.cuda.current_stream(self._stream.device).wait_event(self._mark)
        self._left.held += [*self._read[self._read_before :], *self._left.outputs]
        self._read = []


class Left:
    """What operators have left to run on.

    Attributes:
        outputs: What it writes.
        held: All that it reads or writes, until it is joined.
    """

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.held: list[Tensor] = []

    def is_returned_by(self, grads: Sequence[Tensor]) -> bool:
        """Whether each output is one of these tensors, so that nothing has read it to make them."""
        places = [out.data_ptr() for out in self.outputs]
        return len({*places}) == len(places) and {*places} <= {grad.data_ptr() for grad in grads}


@contextmanager
def leaving(device: torch.device) -> Iterator[Left]:
    """Allow operators on a device to leave kernels, which are joined at the block's end.

    Outside of a recording nothing is left, and `outputs` are those that would be.
    """
    _leaving[device] = left = Left()
    try:
        yield left
    finally:
        del _leaving[device]
        if left.held:
            torch.cuda.current_stream(device).wait_stream(_stream(device))
            left.held.clear()


_leaving: dict[torch.device, Left] = {}  # By device, since backward runs in threads of its own


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
