"""Rows of a checkpoint: what is converted as a whole; read ahead; who hears of an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from moe_qlora.checkpoint.conversion import Group, make_group
from moe_qlora.checkpoint.rows import Slot, filled
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
