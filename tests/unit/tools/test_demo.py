"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import logging
import runpy
import sys
import time
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from tools.demo_parts import screen  # noqa: E402


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
    assert "before LoRA: " in said and "after LoRA: " in said
    assert max(map(len, said.splitlines())) <= 80
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()

    second = ("--quick", "--model", tmp_path / "model", "--steps", 10, "--out", tmp_path / "two")
    assert demo(*second) == 0
    said = capsys.readouterr().out
    assert "the loss" in said and "from scratch" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert (tmp_path / "two/loss.png").is_file()


def test_model_that_is_not_there(tmp_path, demo, capsys):
    assert demo("--model", tmp_path / "gone", "--out", tmp_path) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_a_pipe_gets_lines_while_the_work_goes_on(capsys):
    with screen.Screen(every=0.05) as shown, shown.doing("training", 40) as step:
        for number in range(10):
            time.sleep(0.03)
            step(f"loss {number}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert "training: step " in lines[-1] and " of 40, loss " in lines[-1]
    assert lines[-1].endswith(" left")


def test_interrupting_it_ends_it_with_one_line(tmp_path, demo, capsys, monkeypatch):
    def interrupted(self: screen.Screen, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(screen.Screen, "doing", interrupted)
    assert demo("--quick", "--out", tmp_path) == 130
    said, errors = capsys.readouterr()
    assert said.splitlines()[-1] == "Stopped."
    assert not errors
