"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]


def as_program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/demo.py"), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture
def demo(monkeypatch):
    """A function: the same in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import demo

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
        demo.main()

    level = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield call
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def test_demo(tmp_path, demo, capsys):
    done = as_program("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4 expert parameters quantized" in done.stdout
    assert "times less memory, and the loss fell" in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()

    demo("--quick", "--model", tmp_path / "model", "--steps", 15, "--out", tmp_path / "two")
    said = capsys.readouterr().out
    assert "the loss fell" in said and "from scratch" not in said
    assert (tmp_path / "two/loss.png").is_file()


def test_model_that_is_not_there(tmp_path, demo, capsys):
    with pytest.raises(SystemExit) as stop:
        demo("--model", tmp_path / "gone", "--out", tmp_path)
    assert stop.value.code == 2
    assert "holds no config.json" in capsys.readouterr().err
