"""CUDA graphs of decoder layers on a CPU: a replay runs the recorded Python code again.

It reads and writes the same buffers as a graph does, and sees nothing else of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from moe_qlora.speed import recording
from moe_qlora.speed.graphs import LayerGraphs


class _Graph:
    current: _Graph | None = None  # The one that is recorded

    work: Any = None

    def replay(self) -> None:
        self.work()


class _Generator:
    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


@contextmanager
def _capture(graph: _Graph, pool: Any) -> Iterator[None]:
    _Graph.current = graph
    try:
        yield
    finally:
        _Graph.current = None


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recorded calls run on a CPU during a test."""
    forward, gradients = recording.RecordedCall._forward, recording.RecordedCall._gradients

    def exchanged(call: Any) -> Any:
        return recording._exchanged(call.layer, call.trained, call.weights)

    def record_forward(call: Any) -> Any:
        def again() -> None:
            with exchanged(call):
                call.latest = forward(call)

        if _Graph.current is not None:
            _Graph.current.work = again
        return forward(call)

    def record_gradients(call: Any, edges: Any) -> None:
        def again() -> None:
            with exchanged(call):
                gradients(call, call.latest)

        if _Graph.current is None:
            gradients(call, edges)
        else:
            _Graph.current.work = again

    monkeypatch.setattr(recording.RecordedCall, "_forward", record_forward)
    monkeypatch.setattr(recording.RecordedCall, "_gradients", record_gradients)
    monkeypatch.setattr(recording, "capture", _capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", [_Generator()])


def emulated(model: Any, **arguments: Any) -> LayerGraphs:
    """Return graphs of a model's decoder layers."""
    return LayerGraphs(model, list(model.model.layers), compiled=False, **arguments)
