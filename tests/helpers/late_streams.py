"""A second stream that runs as late as it may: what needs its results earlier finds none.

It holds no tensor that it was not given, so that memory which is freed too early is found too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_qlora.kernels import moe_layer, table
from moe_qlora.kernels.lang import launcher


class _Weak:
    """A tensor, without a reference to its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.place = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "memory is freed before the streams are joined"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class LateStream:
    """As `kernels.streams.SecondStream`; `used` are all that had something to do."""

    current: LateStream | None = None
    used: list[LateStream]

    def __init__(self, device: torch.device, rows: int) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.read: list[Tensor] = []

    def defer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        weak = tree_map_only(Tensor, _Weak, (args, kwargs))

        def run() -> None:
            args, kwargs = tree_map_only(_Weak, _Weak.tensor, weak)
            function(*args, **kwargs)

        self.waiting.append(run)
        if self not in LateStream.used:
            LateStream.used.append(self)

    @contextmanager
    def overlapped(self, *read: Tensor) -> Iterator[None]:
        self.read += read
        before, LateStream.current = LateStream.current, self
        try:
            with _Deferring(self):
                yield
        finally:
            LateStream.current = before

    @contextmanager
    def joined(self) -> Iterator[None]:
        self.join()
        yield

    def join(self) -> None:
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()
        self.read.clear()


class _Deferring(TorchDispatchMode):
    """Defers torch's operators that write to their arguments; others make no more than views."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.stream.defer(func, *args, **kwargs)
        return kwargs["out"] if "out" in kwargs else args[0]


def replace_launches(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]) -> None:
    """Launch kernels by `run(kernel, grid, *args, **options)` during a test."""
    stub = lambda kernel, grid, _: partial(run, kernel, grid)  # noqa: E731
    table.kernels()  # imports all: one that is imported later would have the stub for good
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_qlora.kernels.") and hasattr(module, "launcher"):
            monkeypatch.setattr(module, "launcher", stub)


def run_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let second streams be late during a test."""

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        launcher(kernel, grid, args[0])(*args, **options)

    def deferred(*args: Any, **options: Any) -> None:
        if LateStream.current is None:
            launch(*args, **options)
        else:
            LateStream.current.defer(launch, *args, **options)

    replace_launches(monkeypatch, deferred)
    monkeypatch.setattr(LateStream, "used", [], raising=False)
    monkeypatch.setattr(moe_layer, "SecondStream", LateStream)


def assert_joined() -> None:
    """All that second streams had to do has been done, and there was something."""
    assert LateStream.used and not any(stream.waiting for stream in LateStream.used)
