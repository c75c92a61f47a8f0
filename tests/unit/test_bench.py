"""The benchmarks run, and their rows say what they must."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools/bench"
REQUIRED = (
    *("date", "commit", "gpu", "torch", "triton", "bitsandbytes", "transformers", "peft"),
    *("p20", "p50", "p80"),
)


def test_qwen3_training_on_a_tiny_model(tmp_path):
    out = tmp_path / "model.csv"
    arguments = ["--tiny", "--device", "cpu", "--lora", "experts,attention", "--steps", "5"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "qwen3_training.py"), *arguments, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with out.open(newline="", encoding="utf-8") as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    # two layers of 8 experts of 3 x 64 x 32 weights: 16-bit before, nf4 with its statistics after
    assert float(rows["experts before"]["p50"]) == 2 * 8 * 3 * 64 * 32 * 2
    assert 0.5 < float(rows["packed weight"]["p50"]) < 0.6
    assert float(rows["throughput"]["p20"]) <= float(rows["throughput"]["p80"])
    assert "lora=experts,attention" in rows["step"]["setting"]


def test_a_tiny_layer_beside_its_peers_and_its_plot(tmp_path, monkeypatch):
    out = tmp_path / "layer.csv"
    arguments = ["--tiny", "--device", "cpu", "--repeat", "2", "--peers", "ours,frozen,peft,bnb"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "layer.py"), *arguments, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for peer in ("ours", "frozen", "peft", "bnb"):
        of_peer = {row["metric"] for row in rows if f"peer={peer} " in row["setting"]}
        assert {"forward", "step", "step, checkpointed", "step over FLOP floor"} <= of_peer, peer
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    import plot

    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    plot.main()
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("*.csv")), ids=lambda p: p.name)
def test_every_result_says_where_it_comes_from(path):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        missing = [column for column in REQUIRED if not row.get(column)]
        assert not missing, (path.name, row, missing)


def test_percentiles(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from common import percentiles

    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (2.0, 3.5, 5.0)
