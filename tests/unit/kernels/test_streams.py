"""Nothing that does not wait for the second stream needs its results, or writes what it reads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from fused_layer import CASES, check_layer
from late_streams import assert_joined, run_late

from moe_qlora.kernels import grouped_mm, quantized_mm, streams, table, workspace
from moe_qlora.kernels.streams import SecondStream

KERNELS = {"codes": quantized_mm.KERNEL, "dequantized": grouped_mm.KERNEL}
# Both LoRAs; one, with biases; the other one, transposed; none.
EVERY = ["few", "gelu", "few-transposed", "no-lora"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "kernel", "cap"),
    [
        *((name, way, (None, 1)[i // 2]) for i, name in enumerate(EVERY) for way in KERNELS),
        *(
            pytest.param(name, [*KERNELS][i % 2], (None, 1)[i // 2 % 2], marks=pytest.mark.nightly)
            for i, name in enumerate(sorted(CASES.keys() - EVERY))
        ),
    ],
)
def test_a_layer_waits_for_what_it_needs(
    name: str, kernel: str, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_late(monkeypatch)
    monkeypatch.setattr(table, "KERNELS", [KERNELS[kernel], grouped_mm.KERNEL])
    workspace.set_workspace_cap(cap)
    try:
        check_layer(CASES[name])
    finally:
        workspace.set_workspace_cap(None)
    assert_joined()


class Stream:
    """Notes what waits for what, and which stream is current."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.notes, self.device = name, notes, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.notes.append((self.name, "waits for", other.name))


def test_a_branch_begins_after_the_first_stream_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[Any] = []
    first, second = Stream("first", notes), Stream("second", notes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(streams, "_stream", lambda device: second)
    stream = SecondStream(first.device, 4096)
    read = torch.zeros(3)
    with stream.overlapped(read):
        notes.append("beside")
    assert stream._read == [read]
    stream.join()
    stream.join()
    assert stream._read == []
    begins, ends = ("second", "waits for", "first"), ("first", "waits for", "second")
    assert notes == [begins, "beside", ends]
    for few in (SecondStream(first.device, 16), SecondStream(torch.device("cpu"), 4096)):
        with few.overlapped(read):
            few.join()
    assert len(notes) == 3
