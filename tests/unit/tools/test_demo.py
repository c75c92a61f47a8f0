"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import logging
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))


@pytest.fixture
def demo(monkeypatch):
    """A function that runs the demo as a program, in this process."""

    def call(*arguments: object) -> object:
        monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "tools/demo.py"), run_name="__main__")
        return stop.value.code

    level = transformers.logging.get_verbosity()
    loggers = {name: logging.getLogger(name) for name in ("bitsandbytes", "moe_qlora")}
    levels = {name: logger.level for name, logger in loggers.items()}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # both stay as they are when the test is over
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with warnings.catch_warnings():
        yield call
    for name, logger in loggers.items():
        logger.setLevel(levels[name])
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def test_demo(tmp_path, demo, capsys):
    assert demo("--quick", "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert "4 expert parameters quantized" in said
    assert "times less memory, and the loss" in said
    assert max(map(len, said.splitlines())) <= 80
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
