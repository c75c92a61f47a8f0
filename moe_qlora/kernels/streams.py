"""A second stream in CUDA graphs, on which small kernels overlap large ones.

A layer's products with LoRA's factors, and the gradients of these, wait for memory or fill a part
of the multiprocessors, and the large products after them do not need their results yet. A graph
replays both at once, for none of the host's time. Outside of a graph all kernels stay on one
stream, since changing streams takes the host longer than these kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_LEAST_ROWS = 1024
"""With fewer rows, kernels end about as soon as another branch begins."""


class SecondStream:
    """A branch of the CUDA graph that is being recorded on a device; without one, the same stream.

    Every branch has to be joined before the operator that made it returns.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        many = rows >= _LEAST_ROWS and device.type == "cuda"
        records = many and torch.cuda.is_current_stream_capturing()
        self._stream = _stream(device) if records else None
        self._read: list[Tensor] = []
        self._runs = False

    @contextmanager
    def overlapped(self, *read: Tensor) -> Iterator[None]:
        """Run the block's kernels after all before it, overlapping all after it, until `join`.

        Allocate their outputs before: memory belongs to the stream that it is allocated on.

        Args:
            read: Tensors that they read and that the caller may drop before `join`.
        """
        if self._stream is None:
            yield
            return
        self._read += read
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._runs = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the first stream wait for the overlapped kernels."""
        if self._runs and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._runs = False
        self._read.clear()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
