"""CUDA graphs of decoder layers on a CPU: a replay runs the recorded Python code again.

It reads and writes the same buffers as a graph does, and sees nothing else of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_qlora.packing import parametrize
from moe_qlora.train import graphs
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
                before = _Graph.current.read.setdefault(packed.decoder, packed.codes.detach())
                assert before.data_ptr() == packed.codes.data_ptr(), "a graph reads what was freed"
            return packed

        return noted

    monkeypatch.setattr(parametrize, "read_for_compute", noting(parametrize.read_for_compute))
    monkeypatch.setattr(_Hosted, "fetch", noting(_Hosted.fetch))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recorded calls run on a CPU during a test."""
    forward, gradients = graphs.RecordedCall._forward, graphs.RecordedCall._gradients

    def recorded(run: Any, again: Any) -> Any:
        def at_once(call: Any, *args: Any) -> Any:
            def work() -> None:
                """Write what the call computes where it was when it was recorded."""
                places = call.outs, call.grads, call.grad_x, call.weight_grads
                with call.exchanged():
                    again(call)
                found = [*call.outs, call.grad_x, *call.weight_grads]
                call.outs, call.grads, call.grad_x, call.weight_grads = places
                for place, result in zip([*places[0], places[2], *places[3]], found, strict=True):
                    if place is not None and place is not result:
                        place.data.copy_(result)  # A replay counts no version

            if _Graph.current is not None:
                _Graph.current.work = work
            return run(call, *args)

        return at_once

    def forward_again(call: Any) -> None:
        call.latest = forward(call)

    def gradients_again(call: Any) -> None:
        gradients(call, call.latest)

    monkeypatch.setattr(graphs.RecordedCall, "_forward", recorded(forward, forward_again))
    monkeypatch.setattr(graphs.RecordedCall, "_gradients", recorded(gradients, gradients_again))
    generator = SimpleNamespace(get_offset=lambda: 0, set_offset=lambda _: None)
    monkeypatch.setattr(graphs, "capture", lambda graph, _: _recorded(graph))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
