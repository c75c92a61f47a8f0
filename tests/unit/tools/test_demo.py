"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def demo(monkeypatch):
    """A function that runs the demo as a program, in this process."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "tools/demo.py"), run_name="__main__")

    level = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield call
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def test_demo(tmp_path, demo, capsys):
    demo("--quick", "--out", tmp_path)
    said = capsys.readouterr().out
    assert "4 expert parameters quantized" in said
    assert "times less memory, and the loss fell" in said
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()

    demo("--quick", "--model", tmp_path / "model", "--steps", 10, "--out", tmp_path / "two")
    said = capsys.readouterr().out
    assert "the loss fell" in said and "from scratch" not in said
    assert (tmp_path / "two/loss.png").is_file()


def test_model_that_is_not_there(tmp_path, demo, capsys):
    with pytest.raises(SystemExit) as stop:
        demo("--model", tmp_path / "gone", "--out", tmp_path)
    assert stop.value.code == 2
    assert "holds no config.json" in capsys.readouterr().err
