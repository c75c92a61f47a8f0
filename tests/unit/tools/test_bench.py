"""The benchmarks run, and their rows say what they must."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools/bench"
REQUIRED = (
    *("date", "commit", "gpu", "torch", "triton", "bitsandbytes", "transformers", "peft"),
    *("p20", "p50", "p80"),
)


def called(monkeypatch, script, *arguments):
    """Run a benchmark, in this process."""
    monkeypatch.syspath_prepend(str(BENCH))
    argv = [f"{script}.py", "--tiny", "--device", "cpu", *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(BENCH / f"{script}.py"), run_name="__main__")


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of_peer(rows, peer):
    return {row["metric"]: row for row in rows if f"peer={peer}" in row["setting"].split()}


def test_a_tiny_model_beside_its_peers(tmp_path, monkeypatch):
    out = tmp_path / "model.csv"
    called(monkeypatch, "model", "--steps", 3, "--warmup", 1, "--out", out)
    rows = rows_of(out)
    ours, frozen, theirs = (of_peer(rows, p) for p in ("ours", "frozen", "peft"))
    for metrics in (ours, frozen, theirs):
        assert float(metrics["throughput"]["p20"]) <= float(metrics["throughput"]["p80"])
    # two layers of 4 experts of 3 x 64 x 40 weights: 16 bits before, nf4 and statistics after
    assert float(ours["experts before"]["p50"]) == 2 * 4 * 3 * 64 * 40 * 2
    assert 0.5 < float(ours["packed weight"]["p50"]) < 0.6
    trained = {k: float(v["trained weights"]["p50"]) for k, v in (("o", ours), ("f", frozen))}
    # r=16 on both projections of every expert, and on attention
    experts = 2 * 4 * 16 * ((64 + 2 * 40) + (40 + 64))
    assert trained["o"] == trained["f"] + experts == float(theirs["trained weights"]["p50"])
    losses = [float(peer["first loss"]["p50"]) for peer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert "lora=experts,attention" in ours["step"]["setting"]
    assert "lora=attention" in frozen["step"]["setting"]


def test_a_tiny_layer_beside_its_peers(tmp_path, monkeypatch):
    out = tmp_path / "layer.csv"
    called(monkeypatch, "layer", "--repeat", 2, "--out", out)
    rows = rows_of(out)
    figures = {"forward", "step", "step, checkpointed"}
    for peer in ("ours", "frozen", "peft"):
        metrics = of_peer(rows, peer)
        assert figures <= metrics.keys(), peer
        for name in ("step", "step, checkpointed"):
            assert f"{name} over FLOP floor" in metrics, peer
    # Twice the arithmetic of a forward, and three times under checkpointing, in the same floor.
    frozen = of_peer(rows, "frozen")
    floors = [
        float(frozen[name]["p50"]) / float(frozen[f"{name} over FLOP floor"]["p50"])
        for name in ("step", "step, checkpointed")
    ]
    assert floors[1] == pytest.approx(1.5 * floors[0], rel=1e-3)


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("*.csv")), ids=lambda p: p.name)
def test_every_result_says_where_it_comes_from(path):
    rows = rows_of(path)
    assert rows
    for row in rows:
        required = REQUIRED[:4] if path.name.startswith("two_gpu") else REQUIRED
        missing = [column for column in required if not row.get(column)]
        assert not missing, (path.name, row, missing)
