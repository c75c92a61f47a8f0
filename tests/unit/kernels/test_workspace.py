"""The shared buffer: who keeps it, and that a CUDA graph's pool keeps nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_qlora.kernels import workspace

CPU = torch.device("cpu")
SHAPE = 3, 5


@pytest.fixture(autouse=True)
def _own_buffers() -> Iterator[None]:
    workspace.release_workspace()
    yield
    workspace.release_workspace()


def take(owner: object = "a weight") -> tuple[torch.Tensor, bool]:
    return workspace.allocate("first", SHAPE, torch.float32, CPU, owner)


def test_a_buffer_is_kept_and_remembers_its_owner() -> None:
    tensor, held = take()
    (buffer,) = workspace.buffers(CPU)
    assert not held and buffer.nbytes == 60
    again, held = take()
    assert held and again.data_ptr() == tensor.data_ptr()
    assert workspace.is_current("first", CPU, "a weight")
    assert take("another")[1] is False
    assert not workspace.is_current("first", CPU, "a weight")


def test_another_stream_gets_a_tensor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded there, and what they record must not outlive them."""
    monkeypatch.setattr(workspace, "_persists", lambda device: False)
    tensor, held = take()
    assert tensor.shape == SHAPE and not held
    assert not workspace.buffers(CPU) and not workspace.is_current("first", CPU, "a weight")
    assert take()[1] is False


def test_a_recording_starts_and_ends_with_nothing_remembered() -> None:
    take()
    with workspace.recorded(CPU):
        assert not workspace.is_current("first", CPU, "a weight")
        take()
        assert workspace.is_current("first", CPU, "a weight")
        (buffer,) = workspace.buffers(CPU)
    assert not workspace.is_current("first", CPU, "a weight")
    assert take()[0].data_ptr() == buffer.data_ptr()
    workspace.forget(CPU)
    assert take()[1] is False
