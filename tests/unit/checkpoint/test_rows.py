"""The loop that packs a checkpoint's rows: what it reads ahead, takes of slices, and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_qlora.checkpoint.conversion import Group
from moe_qlora.checkpoint.rows import Slot, ahead, filled
from moe_qlora.errors import CheckpointError, NonFiniteWeightError
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings

CPU = torch.device("cpu")


def rows_of(weights: dict[str, torch.Tensor], reads: list[Any]) -> dict[str, Any]:
    """Files and layout of weights that lie on disk as the model has them."""

    def fetch(key: str, start: int, stop: int | None, device: Any) -> Any:
        reads.append((key, start, stop))
        return lambda: weights[key][start:stop]

    groups = [Group((n,), {n: tuple(w.shape)}, target=n) for n, w in weights.items()]
    layout = SimpleNamespace(convert=lambda group, tensors: tensors)
    files = SimpleNamespace(fetch=fetch, info=lambda key: weights[key])
    return {"files": files, "layout": layout, "groups": groups}


def test_no_more_is_read_ahead_than_there_are_workers() -> None:
    started: list[int] = []

    def read(item: int) -> int:
        started.append(item)
        return -item

    for item, result in ahead(read, range(20), 3):
        assert result.result() == -item and max(started) <= item + 3
    assert sorted(started) == list(range(20))


def test_slices_pack_to_what_the_whole_weight_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_qlora.checkpoint.conversion.SLICE_ELEMENTS", 3 * 4 * 24)
    weights = {"packed": torch.randn(7, 4, 24), "plain": torch.randn(5, 8)}
    settings, reads = CodecSettings("nf4", double_quant=True), []
    slots = {
        "packed": Slot("packed", (7, 4, 24), torch.float32, CPU, settings),
        "plain": Slot("plain", (5, 8), torch.bfloat16, CPU, rows=(1, 4)),
    }
    found = dict(filled(**rows_of(weights, reads), slots=slots))
    expected = pack(weights["packed"], settings)
    assert torch.equal(found["packed"].codes, expected.codes)
    assert torch.equal(found["packed"].absmax, expected.absmax)
    assert torch.equal(found["plain"], weights["plain"][1:4].bfloat16())
    assert [read for read in reads if read[0] == "packed"] == [
        ("packed", 0, 3), ("packed", 3, 6), ("packed", 6, 7),
    ]  # fmt: skip


def test_a_share_without_rows_reads_nothing() -> None:
    reads: list[Any] = []
    slots = {"a": Slot("a", (5, 8), torch.float32, CPU, rows=(5, 5))}
    found = dict(filled(**rows_of({"a": torch.randn(5, 8)}, reads), slots=slots))
    assert found["a"].shape == (0, 8) and not reads


def test_a_value_that_cannot_be_packed_is_named_by_its_row() -> None:
    weight = torch.randn(6, 4, 24)
    weight[4, 1, 1] = torch.nan
    slots = {"a": Slot("a", weight.shape, torch.float32, CPU, CodecSettings("nf4"))}
    with pytest.raises(NonFiniteWeightError, match=r"a holds NaN or inf in row 4"):
        list(filled(**rows_of({"a": weight}, []), slots=slots))


def test_an_error_of_reading_reaches_the_slot() -> None:
    class Noting(Slot):
        def fail(self, error: Any) -> None:
            self.error = error

    def fetch(*place: Any) -> Any:
        raise CheckpointError("damaged")

    known = rows_of({"a": torch.randn(5, 8)}, [])
    known["files"].fetch = fetch
    slot = Noting("a", (5, 8), torch.float32, CPU)
    list(filled(**known, slots={"a": slot}))
    assert str(slot.error) == "damaged"
    with pytest.raises(CheckpointError, match="damaged"):
        list(filled(**known, slots={"a": Slot("a", (5, 8), torch.float32, CPU)}))
