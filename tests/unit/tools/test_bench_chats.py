"""The batches of the benchmarks: what carries a loss, and the losses of preferences."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[3] / "tools/bench"


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import chats

    return chats


def made(chats: Any, kind: str, rows: int = 3, seq: int = 400, steps: int = 4) -> list[Any]:
    options = Namespace(micro_batch=rows, seq=seq, warmup=1, steps=steps - 1)
    return list(chats.batches(kind, 50, options, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["longest", "padded", "dpo", "grpo"])
def test_rows_of_chats_are_padded_behind_and_prompts_have_no_loss(chats: Any, kind: str) -> None:
    for batch in made(chats, kind):
        ids, labels, mask = (batch[k] for k in ("input_ids", "labels", "attention_mask"))
        lengths = mask.sum(1)
        assert len(ids) == (6 if kind == "dpo" else 3)
        assert ids.shape[1] == (lengths.max() if kind == "longest" else 400)
        for row, length in enumerate(lengths.tolist()):
            kept = labels[row] != -100
            first = int(kept.nonzero()[0])
            assert 0 < first < length and kept[first:length].all() and not kept[length:].any()
            assert torch.equal(labels[row][kept], ids[row][kept])
            assert mask[row, :length].all()
        assert chats.with_loss(batch) == int((labels != -100).sum())


def test_packed_chats_fill_rows_and_count_positions_from_zero(chats: Any) -> None:
    starts = []
    for batch in made(chats, "packed", seq=3000):
        ids, labels, positions = (batch[k] for k in ("input_ids", "labels", "position_ids"))
        assert ids.shape == labels.shape == positions.shape == (3, 3000)
        first = positions == 0
        assert first[:, 0].all() and (labels[first] == -100).all()
        following = positions[:, 1:][~first[:, 1:]]
        assert torch.equal(following, positions[:, :-1][~first[:, 1:]] + 1)
        starts.append(int(first.sum()))
    assert starts[:2] == [3, 3]  # of one chat each, before those that count
    assert min(starts[2:]) > 8
    again = made(chats, "packed", seq=3000)
    assert all(torch.equal(batch[k], again[-1][k]) for k in batch)


@pytest.mark.parametrize("kind", ["dpo"])
def test_a_model_trains_on_them(
    chats: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import model

    out = tmp_path / "rows.csv"
    words = ["--tiny", "--device", "cpu", "--peers", "ours", "--steps", "1", "--warmup", "1"]
    monkeypatch.setattr(sys, "argv", ["model.py", *words, "--data", kind, "--out", str(out)])
    model.main()
    text = out.read_text("utf-8")
    assert f"data={kind}" in text and "throughput with loss" in text
