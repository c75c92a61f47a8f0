"""The stress run of saves: a few rounds of it, and what it calls a fault."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("copied")  # one thread, as a copy of the process has


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    return importlib.import_module("stress_saves")


def test_a_few_rounds(tool, monkeypatch, capsys):
    arguments = ["--processes", "2", "3", "--rounds", "4", "--kill", "0.3"]
    monkeypatch.setattr(sys, "argv", ["stress_saves.py", *arguments])
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert out.count("4 rounds in") == 2
    assert out.splitlines()[-1] == "0 rounds failed"


def test_commands_on_failing_disks(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool.Commands, "_mount", lambda *_: False)  # also where root runs tests
    arguments = ["--commands", "export-vllm", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["stress_saves.py", *arguments])
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert all(f"1 export-vllm, {harm}: " in out for harm in tool.HARMS if harm != "small disk")
    assert out.splitlines()[-1] == "0 rounds failed"


def test_what_a_command_left_is_a_fault(tool, tmp_path):
    stress = tool.Commands(tmp_path, 0, ["export-vllm"])
    assert stress.round("export-vllm", "refused") == []
    stress.whole["export-vllm"]["README.md"] += b"?"
    faults = stress.round("export-vllm", "killed")
    assert any("the next run fails" in fault for fault in faults)


def test_what_is_damaged_or_lost_is_a_fault(tool, tmp_path):
    stress = tool.Stress(tmp_path, seed=0)
    before = stress.start("holds a model")
    assert stress.judge(before, [1], saved=False) == []
    assert "neither the old model nor a new one" in stress.judge(before, [1], saved=True)[0]
    (stress.target / "notes.txt").unlink()
    assert stress.judge(before, [1], saved=False) == ["notes.txt is lost"]
    next(stress.target.glob("*.safetensors")).unlink()
    assert "is damaged" in stress.judge(before, [1], saved=False)[0]
    (stress.target / "config.json").unlink()
    assert stress.judge(before, [1], saved=False) == ["the model is lost"]
    before = stress.start("holds a 16-bit model")
    assert stress.judge(before, [1], saved=False) == []
    assert "is damaged" in stress.judge(before, [1], saved=True)[0]
    next(stress.target.glob("*.safetensors")).unlink()
    assert stress.judge(before, [1], saved=False) == ["the 16-bit model is lost"]
    before = stress.start("absent")
    assert stress.judge(before, [1], saved=False) == []
    assert stress.judge(before, [1], saved=True) == ["the model is lost"]
