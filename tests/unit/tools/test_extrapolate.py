"""Extrapolation: collectives and fits by hand, rows as they are written, the page against rows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools/bench"
HEADING = "date,commit,gpu,engine,gpus,model,layers,seq,micro_batch,step_s,tokens_per_s,"
HEADING += "model_gb,build_peak_gb,train_peak_gb,note\n"


@pytest.fixture
def tools(monkeypatch):
    """The modules `scaling` and `extrapolate`."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("scaling"), importlib.import_module("extrapolate")
    for name in ("scaling", "extrapolate", "common", "shapes"):
        sys.modules.pop(name, None)


@pytest.fixture
def work(tools):
    scaling, _ = tools
    return scaling.Work(
        layers=10, expert_layers=8, flops=2e9, layer_bytes=5e9, root_bytes=1e9,
        expert_gradients=8e8, other_gradients=1e8, row_bytes=30_000,
    )  # fmt: skip


def test_rings_by_hand(tools):
    scaling, _ = tools
    bus, network = 200e9, 10e9
    assert scaling.ring(8e9, 1, bus, network) == 0
    assert scaling.ring(8e9, 8, bus, network) == pytest.approx(7e9 / bus + 7 * 3e-6)
    # Two full nodes: eight rings with a card each, which are slower than NVLink here.
    two = 8e9 * 15 / 16 / (8 * network) + 14 * 3e-6 + 2 * 10e-6
    assert scaling.ring(8e9, 16, bus, network) == pytest.approx(two)
    assert scaling.ring(8e9, 16, bus, 50e9) == pytest.approx(8e9 * 15 / 16 / bus + 62e-6)
    # One rank of each of four nodes, over one card.
    four = 8e9 * 3 / 4 / network + 4 * 10e-6
    assert scaling.ring(8e9, 4, bus, network, across=True) == pytest.approx(four)


def test_all_to_all_by_hand(tools):
    scaling, _ = tools
    assert scaling.all_to_all(4e9, 4, 200e9, 10e9) == pytest.approx(3e9 / 200e9)
    sixteen = 4e9 * 7 / 16 / 200e9 + 4e9 * 8 / 16 / 10e9
    assert scaling.all_to_all(4e9, 16, 200e9, 10e9) == pytest.approx(sixteen)


def test_what_compute_hides(tools, work):
    scaling, _ = tools
    bus, network = 200e9, 40e9

    def exposed(engine, gpus, group, busy):
        return scaling.exposed(work, scaling.Way(engine, gpus, group), 1000, busy, bus, network)

    reduced = 2 * scaling.ring(9e8, 8, bus, network)
    assert exposed("single", 1, 1, 0.0) == 0
    assert exposed("ddp", 8, 1, 0.0) == pytest.approx(reduced)
    assert exposed("ddp", 8, 1, 0.003) == pytest.approx(reduced - 0.002)
    assert exposed("ddp", 8, 1, 1.0) == 0
    root = scaling.ring(1e9, 8, bus, network)
    assert exposed("fsdp", 8, 8, 1.0) == pytest.approx(root)  # of which nothing is hidden
    layers = 10 * (2 * scaling.ring(5e8, 8, bus, network) + scaling.ring(9e7, 8, bus, network))
    assert exposed("fsdp", 8, 8, 0.0) == pytest.approx(root + layers)
    sums = 2 * scaling.ring(9e8 / 8, 2, bus, network, across=True)
    assert exposed("fsdp", 16, 8, 0.0) == pytest.approx(root + layers + sums)
    travel = 6 * 8 * 30_000 * 1000 * 7 / 8 / bus
    assert exposed("ep", 8, 8, 1.0) == pytest.approx(travel)
    assert exposed("ep", 8, 8, 0.0) == pytest.approx(
        travel + 2 * scaling.ring(1e8, 8, bus, network)
    )


def test_fits_find_what_rows_were_made_of(tools, work):
    scaling, _ = tools
    speed = scaling.Speed(2e-3, 3e14, {"ddp": 0.0, "fsdp": 4e-3, "ep": 1e-3}, 240e9)

    def row(engine, gpus, batch, source="two_gpu.csv", slower=1.0):
        way = scaling.Way(engine, gpus, gpus if engine in ("fsdp", "ep") else 1)
        seconds = slower * scaling.step_seconds(work, way, batch * 4096, speed, speed.bus)
        sizes = (10, 4096, batch, seconds, "bfloat16", None, None)
        return scaling.Row(source, engine, engine, gpus, "model", *sizes)

    rows = [row("single", 1, 1), row("single", 1, 4), row("ddp", 2, 4), row("fsdp", 2, 4)]
    rows += [row("ep", 2, 1), row("fsdp", 2, 1, "two_gpu_first.csv", slower=3.0)]
    found = scaling.fit(rows, lambda row: work, speed.bus)
    assert (found.host, found.flops) == pytest.approx((speed.host, speed.flops))
    assert found.engine == pytest.approx(speed.engine, abs=1e-12)
    # Of rows of one size the host's time cannot be told.
    alone = scaling.fit(rows[:1] * 2, lambda row: work, speed.bus)
    assert alone.host * 10 + 2e9 * 4096 / alone.flops == pytest.approx(rows[0].step)


def test_rows_are_read(tools, tmp_path):
    _, extrapolate = tools
    (tmp_path / "two_gpu.csv").write_text(
        HEADING
        + 'd,c,g,fsdp2,2,qwen3-30b-a3b,16,4096,4,0.5,,3.6,8,38,"LoRA r=16 experts,attention"\n'
        + "d,c,g,ep,2,qwen3-30b-a3b,16,4096,4,,,,,,fails: RuntimeError\n"
        + 'd,c,g,whole,2,qwen3-30b-a3b,16,4096,4,0.5,,3.6,8,38,"LoRA r=16 attention"\n'
        + "d,c,g,whole,2,qwen3-30b-a3b,16,4096,4,0.5,,3.6,8,38,no reshard\n"
    )
    (row,) = extrapolate.read_rows(tmp_path)
    assert (row.engine, row.gpus, row.step, row.resident, row.peak) == ("fsdp", 2, 0.5, 3.6, 38.0)
    rows = extrapolate.read_rows()
    first = next(row for row in rows if row.source == "two_gpu_first.csv")
    assert (first.engine, first.step) == ("single", pytest.approx(4096 / 8233))
    assert extrapolate.bus_bandwidth(BENCH / "results") > 1e11


def test_a_page_of_a_small_model(tools, monkeypatch):
    """Work by hand, and a page from end to end."""
    scaling, extrapolate = tools
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16,
             "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 500,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    monkeypatch.setattr(extrapolate, "MODELS", {"small": ("qwen3_moe", sizes)})
    monkeypatch.setattr(extrapolate, "SEQ", 128)
    planner = extrapolate.planner_of("small", None, batch=1, adapters="bfloat16", linears=True)
    work = extrapolate.work_of(planner)
    attention, experts, router = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 32 * 2, 64 * 8
    # r=16 on q and o, on k and v, and on two experts' gate_up and down
    lora = 16 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 64 + 32 + 64))
    products = 4 * 128 * 4 * (16 + 16)
    layer = 6 * (attention + experts + router) + 8 * lora + products
    assert work.flops == 2 * layer + 6 * 64 * 500
    assert (work.layers, work.expert_layers, work.row_bytes) == (2, 2, 2 * 64 * 2)
    assert work.expert_gradients == 2 * 8 * 16 * (64 + 64 + 32 + 64) * 2

    def row(engine, gpus, batch, seconds):
        rest = (2, 128, batch, seconds, "bfloat16", 0.1, 0.2)
        return scaling.Row("two_gpu.csv", engine, engine, gpus, "small", *rest)

    rows = [row("single", 1, 1, 0.1), row("single", 1, 4, 0.2), row("fsdp", 2, 4, 0.25)]
    monkeypatch.setattr(extrapolate, "read_rows", lambda: rows)
    text = extrapolate.page(["small"], [8, 16])
    assert "### small" in text
    for words in ("| single, 1 | 2 | 1 |", "| fsdp, 2 | 2 | 4 |", "fsdp 8 x 2 copies", "ep 8 x 2"):
        assert words in text
    assert text.count("**") >= 2 + 2 * 2  # the quickest of each number of GPUs


def test_the_page_agrees_with_what_was_measured():
    """Memory within 5 %; speeds, where they were fitted, within 10 %."""
    text = (BENCH / "many_gpus.md").read_text(encoding="utf-8")
    for model in ("qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.6", "deepseek-v3", "kimi-k2"):
        assert f"### {model}\n" in text
    lines = [line.split(" | ") for line in text.splitlines() if "two_gpu" in line and "|" in line]
    assert len(lines) >= 6
    for cells in lines:
        ratios = [float(cells[place].rstrip(" |")) for place in (9, 12) if cells[place][:1] != "-"]
        assert all(0.95 <= ratio <= 1.05 for ratio in ratios), cells
        if "single" in cells[0]:
            assert 0.9 <= float(cells[6]) <= 1.1, cells
