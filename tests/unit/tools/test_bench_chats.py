"""The batches of the benchmarks: what carries a loss, and the losses of preferences."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

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


def test_pairs_share_their_prompts(chats: Any) -> None:
    for batch in made(chats, "dpo"):
        for chosen, rejected, labels in zip(
            *batch["input_ids"].chunk(2), batch["labels"][:3], strict=True
        ):
            answer = labels != -100
            first = int(answer.nonzero()[0])
            assert torch.equal(chosen[:first], rejected[:first])
            assert not torch.equal(chosen[answer], rejected[answer])


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


class _Model(nn.Module):
    """Logits by token, plus an adapter that can be disabled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.adapter = nn.Embedding(50, 50), nn.Parameter(torch.randn(50))
        self.on = True

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return SimpleNamespace(logits=self.table(input_ids) + self.adapter * self.on)

    def disable_adapter(self) -> Any:
        model = self

        class Off:
            def __enter__(self) -> None:
                model.on = False

            def __exit__(self, *_: object) -> None:
                model.on = True

        return Off()


def test_the_loss_of_pairs_is_that_of_dpo(chats: Any) -> None:
    model, batch = _Model(), made(chats, "dpo")[0]

    def log_probability(row: int) -> torch.Tensor:
        ids, labels = batch["input_ids"][row : row + 1], batch["labels"][row]
        every = model(ids).logits[0].log_softmax(-1)
        return torch.stack(
            [every[i - 1, labels[i]] for i in range(1, len(labels)) if labels[i] != -100]
        ).sum()

    gained = []
    for row in range(6):
        with_adapter = log_probability(row)
        with model.disable_adapter():
            gained.append(with_adapter - log_probability(row))
    expected = [
        -math.log(1 / (1 + math.exp(-0.1 * (gained[i] - gained[i + 3]).item()))) for i in range(3)
    ]
    found = chats.dpo_loss(model, batch)
    assert found.item() == pytest.approx(sum(expected) / 3, rel=1e-4)
    found.backward()
    assert model.adapter.grad is not None and model.adapter.grad.any()


def test_the_loss_of_groups_has_the_gradient_of_the_policy(chats: Any) -> None:
    """While the policy is that of before, each token's gradient is its advantage's."""
    model, batch = _Model(), made(chats, "grpo")[0]
    chats.grpo_loss(model, batch).backward()
    found, model.adapter.grad = model.adapter.grad, None
    assert found is not None
    advantages = torch.tensor([-1.0, 0.0, 1.0]) / math.sqrt(2 / 3)
    (
        -(chats.log_probabilities(model, batch).sum(1) * advantages).sum() / chats.with_loss(batch)
    ).backward()
    assert torch.allclose(found, model.adapter.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", ["packed", "dpo"])
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


def test_losses_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import losses

    out = tmp_path / "losses.csv"
    monkeypatch.setattr(losses, "STEPS", 2)
    words = ["--tiny", "--device", "cpu", "--seq", "32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["losses.py", *words])
    losses.main()
    assert "largest difference from plain" in out.read_text("utf-8")
