"""CUDA graphs of decoder layers on a CPU: a replay runs the recorded Python code again.

It reads and writes the same buffers as a graph does, and sees nothing else of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_qlora.packing import parametrize
from moe_qlora.train import recording
from moe_qlora.train.offload import _Hosted


class _Graph:
    current: _Graph | None = None  # The one that is recorded or replayed

    work: Any = None

    def __init__(self) -> None:
        self.read: dict[Any, Tensor] = {}  # Codes by weight, alive: no other has their address

    def replay(self) -> None:
        with _recorded(self):
            self.work()


@contextmanager
def _recorded(graph: _Graph) -> Iterator[None]:
    before, _Graph.current = _Graph.current, graph
    try:
        yield
    finally:
        _Graph.current = before


def in_graph() -> bool:
    """Whether a graph is recorded or replayed now: its launches wait for nothing outside of it."""
    return _Graph.current is not None


def hold_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a replay fail that finds packed weights elsewhere than they were when it was recorded."""

    def noting(read: Any) -> Any:
        def noted(*args: Any) -> Any:
            packed = read(*args)
            if _Graph.current is not None:
                before = _Graph.current.read.setdefault(packed.serial, packed.codes.detach())
                assert before.data_ptr() == packed.codes.data_ptr(), "a graph reads what was freed"
            return packed

        return noted

    monkeypatch.setattr(parametrize, "read_for_compute", noting(parametrize.read_for_compute))
    monkeypatch.setattr(_Hosted, "fetch", noting(_Hosted.fetch))


class _Generator:
    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recorded calls run on a CPU during a test."""
    forward, gradients = recording.RecordedCall._forward, recording.RecordedCall._gradients

    def exchanged(call: Any) -> Any:
        return recording._exchanged(call.layer, call.trained, call.weights)

    def at(places: list[Any], call: Any, name: str) -> None:
        """Write what a call has computed where it was when it was recorded."""
        for place, result in zip(places, getattr(call, name), strict=True):
            place.data.copy_(result)  # A replay counts no version
        setattr(call, name, places)

    def record_forward(call: Any) -> Any:
        def again() -> None:
            outs, grads = call.outs, call.grads
            with exchanged(call):
                call.latest = forward(call)
            at(outs, call, "outs")
            call.grads = grads

        if _Graph.current is not None:
            _Graph.current.work = again
        return forward(call)

    def record_gradients(call: Any, edges: Any) -> None:
        def again() -> None:
            of_weights, of_x = call.weight_grads, call.grad_x
            with exchanged(call):
                gradients(call, call.latest)
            at(of_weights, call, "weight_grads")
            if of_x is not None:
                call.grad_x = of_x.copy_(call.grad_x)

        if _Graph.current is not None:
            _Graph.current.work = again
        gradients(call, edges)

    monkeypatch.setattr(recording.RecordedCall, "_forward", record_forward)
    monkeypatch.setattr(recording.RecordedCall, "_gradients", record_gradients)
    monkeypatch.setattr(recording, "capture", lambda graph, _: _recorded(graph))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", [_Generator()])
