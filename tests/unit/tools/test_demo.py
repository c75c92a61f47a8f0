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


@pytest.fixture
def logs_as_they_were():
    level = transformers.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("bitsandbytes", "moe_qlora")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        yield
    for logger, was in zip(loggers, levels, strict=True):
        logger.setLevel(was)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.mark.usefixtures("logs_as_they_were")
def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # both stay as they are when the test is over
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "tools/demo.py"), run_name="__main__")
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "4 expert parameters quantized" in said
    assert "times less memory, and the loss" in said
    assert max(map(len, said.splitlines())) <= 80
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
