"""Rows of a checkpoint: what is converted as a whole; read ahead; who hears of an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from moe_qlora.checkpoint.conversion import Group, make_group
from moe_qlora.checkpoint.rows import Slot, ahead, filled, indexed
from moe_qlora.errors import CheckpointError, MoeQloraError

EXPERTS, IN = 5, 6


def test_what_is_not_known_to_keep_experts_apart_is_converted_as_a_whole() -> None:
    shapes = {"w": (EXPERTS, 2, IN)}
    halves = {"w.a": (EXPERTS, 1, IN), "w.b": (EXPERTS, 1, IN)}
    sources = {"a": ("w.a",), "b": ("w.b",)}
    within = WeightConverter(["a", "b"], ["w"], [Concatenate(dim=1)])
    across = WeightConverter(["a", "b"], ["w"], [Concatenate(dim=0)])
    assert make_group("w", within, sources, shapes, halves).unit == "row"
    assert make_group("w", across, sources, shapes, halves).unit == ""
    turned = WeightConverter(["a"], ["w"], [Transpose(0, 1)])
    square: dict[str, Any] = {"w": (EXPERTS, EXPERTS, IN)}
    stored = {"w.a": (EXPERTS, EXPERTS, IN)}
    assert make_group("w", turned, {"a": ("w.a",)}, square, stored).unit == ""


CPU = torch.device("cpu")


class Noting(Slot):
    error: MoeQloraError | None = None

    def fail(self, error: MoeQloraError) -> None:
        self.error = error


def test_no_more_is_read_ahead_than_there_are_workers() -> None:
    started: list[int] = []
    for item, result in ahead(lambda item: started.append(item) or -item, range(20), 3):
        assert result.result() == -item and max(started) <= item + 3
    assert sorted(started) == list(range(20))


def test_an_error_reaches_the_slots_and_a_share_without_rows_reads_nothing() -> None:
    def fetch(*place: Any) -> Any:
        raise CheckpointError("damaged")

    files: Any = SimpleNamespace(fetch=fetch, info=lambda key: torch.empty(0))
    known = files, SimpleNamespace(), [Group(("a",), {"a": (5, 8)}, target="a")]
    slot = Noting("a", (5, 8), torch.float32, CPU)
    dict(filled(*known, {"a": slot}))
    assert str(slot.error) == "damaged"
    with pytest.raises(CheckpointError, match="damaged"):
        dict(filled(*known, {"a": Slot("a", (5, 8), torch.float32, CPU)}))
    empty = Slot("a", (5, 8), torch.float32, CPU, rows=(5, 5))
    assert dict(filled(*known, {"a": empty}))["a"].shape == (0, 8)


def test_a_device_without_a_number_is_the_callers_current_one(monkeypatch) -> None:
    """Threads that read ahead have a current device of their own, the first."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    slot = Slot("a", (5, 8), torch.float32, torch.device("cuda"))
    assert slot.device == indexed(torch.device("cuda")) == torch.device("cuda:3")
    assert indexed(CPU) == CPU and indexed(torch.device("cuda:1")).index == 1
