"""Nothing that does not wait for the second stream needs its results, or writes what it reads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fused_layer import CASES, build, check_layer
from late_streams import LateStream, assert_joined, run_late

from moe_qlora.kernels import (
    grouped_mm,
    moe_layer,
    quantized_mm,
    row_kernels,
    streams,
    table,
    workspace,
)
from moe_qlora.kernels.streams import SecondStream

KERNELS = {
    "fetches": replace(quantized_mm.KERNEL, gathers=True),
    "codes": quantized_mm.KERNEL,
    "dequantized": grouped_mm.KERNEL,
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("cap", [None, 1])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_waits_for_what_it_needs(
    name: str, kernel: str, cap: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_late(monkeypatch)
    monkeypatch.setattr(row_kernels, "copies_apart", lambda tile: apart)
    monkeypatch.setattr(moe_layer, "copies_apart", lambda tile: apart)
    monkeypatch.setattr(table, "KERNELS", [KERNELS[kernel], grouped_mm.KERNEL])
    workspace.set_workspace_cap(cap)
    try:
        check_layer(CASES[name])
    finally:
        workspace.set_workspace_cap(None)
    assert_joined()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_what_is_left_reads_nothing_that_others_may_overwrite(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left runs after a compiler has used the memory of the operator's arguments again."""
    made, _, x, weights, index, biases, loras = build(CASES[name])
    with torch.no_grad():
        operands = moe_layer.Operands(x, weights, biases, loras)
        state = moe_layer.gate_up_forward(made, index, operands)
        grad = torch.randn_like(x)
        expected = moe_layer.backward(made, state.routing, state.saved, grad, operands)
        run_late(monkeypatch)
        monkeypatch.setattr(LateStream, "leaves", True)
        workspace.release_workspace()
        found = moe_layer.backward(made, state.routing, state.saved, grad, operands)
        left = sum(len(stream.waiting) for stream in LateStream.used)
        assert left == (loras[1] is not None) + 2 * (loras[0] is not None)
        for argument in (x, weights, grad, state.routing.ints, *state.saved):
            argument.random_(0, 2)
        for stream in LateStream.used:
            stream.join()
    for mine, right in zip(found, expected, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None and right is not None:
            torch.testing.assert_close(mine, right, rtol=0, atol=0)


class Stream:
    """Notes what waits for what, and which stream is current."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.notes, self.device = name, notes, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.notes.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        self.notes.append((self.name, "is noted"))
        return f"what {self.name} had"

    def wait_event(self, event: str) -> None:
        self.notes.append((self.name, "waits for", event))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the two streams of a recording do."""
    notes: list[Any] = []
    first, second = Stream("first", notes), Stream("second", notes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(streams, "_stream", lambda device: second)
    return notes


CUDA = torch.device("cuda", 0)
BEGINS, ENDS = ("second", "waits for", "first"), ("first", "waits for", "second")


def test_a_branch_begins_after_the_first_stream_and_is_waited_for(notes: list[Any]) -> None:
    stream, read = SecondStream(CUDA, 4096), torch.zeros(3)
    with stream.beside(read):
        notes.append("beside")
    assert stream._read == [read]
    stream.join()
    stream.join()
    assert stream._read == []
    assert notes == [BEGINS, "beside", ENDS]
    for few in (SecondStream(CUDA, 16), SecondStream(torch.device("cpu"), 4096)):
        with few.beside(read):
            few.join()
    assert len(notes) == 3


@pytest.mark.parametrize("ends", ["start", "beside", "join"])
def test_what_is_launched_later_waits_for_no_more(ends: str, notes: list[Any]) -> None:
    stream = SecondStream(CUDA, 4096)
    for number in (1, 2):
        stream.soon(lambda number=number: notes.append(number), torch.zeros(3))
    notes.append("what must not wait")
    if ends == "beside":
        with stream.beside():
            notes.append("beside")
    else:
        getattr(stream, ends)()
    noted = ("first", "is noted")
    began = [noted, noted, "what must not wait", ("second", "waits for", "what first had"), 1, 2]
    rest = {"start": [], "beside": [BEGINS, "beside"], "join": [ENDS]}[ends]
    assert notes == began + rest
    SecondStream(torch.device("cpu"), 4096).soon(lambda: notes.append("at once"))
    assert notes[-1] == "at once"


def test_what_is_left_is_joined_at_the_end(notes: list[Any]) -> None:
    outputs = [torch.zeros(3), torch.zeros(3)]
    with streams.leaving(CUDA) as left:
        stream = SecondStream(CUDA, 4096)
        assert stream.leaves
        with stream.beside(torch.zeros(2)):
            notes.append("waited for")
        stream.mark()
        with stream.beside(held := torch.zeros(2)):
            notes.append("left")
        stream.leave([None, *outputs])
        assert any(each is held for each in left.held) and len(left.held) == 3
        assert not left.is_returned_by(outputs[:1]) and left.is_returned_by(outputs)
    assert not left.held and not streams._leaving
    marked = ("second", "is noted"), ("first", "waits for", "what second had")
    assert notes == [BEGINS, "waited for", marked[0], BEGINS, "left", marked[1], ENDS]


def test_what_is_left_is_joined_with_what_comes_after(notes: list[Any]) -> None:
    with streams.leaving(CUDA) as left:
        for _ in range(2):
            stream = SecondStream(CUDA, 4096)
            stream.mark()
            with stream.beside(torch.zeros(2)):
                notes.append("left")
            stream.leave([torch.zeros(3)])
        assert left.held
        other = SecondStream(CUDA, 4096)
        with other.beside():
            notes.append("other")
        other.join()
        assert not left.held and len(left.outputs) == 2
    assert notes[-3:] == [BEGINS, "other", ENDS]


def test_outside_of_a_recording_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    out = torch.zeros(3)
    with streams.leaving(CUDA) as left:
        stream = SecondStream(CUDA, 4096)
        assert not stream.leaves
        stream.mark()
        stream.leave([out])
        assert left.is_returned_by([torch.zeros(3), out]) and not left.held
        assert not left.is_returned_by([])
        stream.leave([out])  # The same memory twice: added up where it lies
        assert not left.is_returned_by([out])
    assert not streams._leaving


def test_without_a_recording_there_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(streams, "_stream", lambda device: pytest.fail("a stream"))
    stream = SecondStream(torch.device("cuda"), 4096)
    with stream.beside(), stream.joined():
        assert moe_layer.SecondStream is SecondStream
