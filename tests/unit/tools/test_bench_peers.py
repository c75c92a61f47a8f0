"""A peer that has modules of its own is put into the benchmarks' models as it asks for."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

BENCH = Path(__file__).parents[3] / "tools/bench"


class Base(nn.Module):
    """Experts that are kept as they are, frozen."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.weights = nn.ParameterList([gate_up, down]).requires_grad_(False)

    @classmethod
    def from_float(cls, gate_up, down, **_):
        return cls(gate_up.clone(), down.clone())


class Lora(nn.Module):
    """LoRA on the first expert alone, as a stand-in for the peer's."""

    def __init__(self, base, r, alpha, dtype):
        super().__init__()
        self.base, self.rank, self.fast = base, r, False
        self.gate_up_lora_B = nn.Parameter(torch.zeros(base.weights[0].shape[1], r, dtype=dtype))
        self.down_lora_B = nn.Parameter(torch.zeros(base.weights[1].shape[1], r, dtype=dtype))

    def forward(self, hidden, index, weights):
        assert self.fast
        gate, up = (hidden @ self.base.weights[0][0].T + self.gate_up_lora_B.sum(1)).chunk(2, -1)
        return (gate * up) @ self.base.weights[1][0].T + self.down_lora_B.sum(1)


@pytest.fixture
def package(monkeypatch):
    """A package called as experts4bit-qlora is, without kernels; notes what is asked of it."""
    asked = []

    def offload(lora, device, pin):
        asked.append(("offload", lora, pin))
        return SimpleNamespace(pinned=False)

    def fast(model, dgrad):
        found = [module for module in model.modules() if isinstance(module, Lora)]
        checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        asked.append(("fast", found, dgrad, checkpointing))
        for module in found:
            module.fast = True
        return len(found)

    def slow(model):
        asked.append(("slow",))

    theirs = SimpleNamespace(
        Experts4bit=Base,
        ExpertsLoRA=Lora,
        enable_expert_offload=offload,
        enable_fast_train=fast,
        disable_fast_train=slow,
        asked=asked,
    )
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setitem(sys.modules, "experts4bit_qlora", theirs)
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers, "imported", lambda name, device: importlib.import_module(name))
    monkeypatch.setattr(peers, "versions", lambda peer: "")
    return theirs


def trained(monkeypatch, out, *arguments):
    """Rows of two steps of the peer's tiny model on the CPU, by metric."""
    script = importlib.import_module("model")
    words = ["--tiny", "--device", "cpu", "--peers", "e4b", "--steps", "1", "--warmup", "1"]
    words += ["--expert-rank", "8", *arguments, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["model.py", *words])
    script.main()
    with out.open(newline="", encoding="utf-8") as file:
        return {row["metric"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("words", "kept"), [(["--offload"], 2), (["--offload", "1"], 1), ([], 0)])
def test_experts_of_a_peer_go_to_host_memory_where_it_is_asked_for(
    words, kept, package, tmp_path, monkeypatch
):
    rows = trained(monkeypatch, tmp_path / "model.csv", *words)
    setting = rows["throughput"]["setting"].split()
    assert ("with=offload" + "-1" * (kept == 1) in setting) == (kept > 0)
    assert {"peer=e4b", "expert_rank=8", "checkpointing=reentrant", "nf4"} <= {*setting}
    offloaded = [call for call in package.asked if call[0] == "offload"]
    assert len(offloaded) == kept and all(pin for _, _, pin in offloaded)
    # Once for the whole model, after gradient checkpointing, and undone for the next peer.
    (_, modules, dgrad, checkpointing), end = package.asked[kept:]
    assert len(modules) == 2 and dgrad and checkpointing and end == ("slow",)
    assert {module.rank for module in modules} == {8}
    assert {id(call[1]) for call in offloaded} == {id(m) for m in modules[len(modules) - kept :]}
    stacks = 2 * 4 * 3 * 64 * 40 * 2  # two layers of 4 experts, in bf16
    assert float(rows["experts before"]["p50"]) == stacks
    held = rows.get("experts in host memory", {"p50": 0})
    assert float(held["p50"]) == stacks * kept / 2


def test_a_fast_path_that_leaves_out_modules_is_no_result(package, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "enable_fast_train", lambda model, dgrad: 1)
    rows = trained(monkeypatch, tmp_path / "model.csv", "--offload")
    assert "fails: RuntimeError: its fast path took 1 modules, not 2" in rows
    assert "throughput" not in rows
    assert package.asked[-1] == ("slow",)
