"""The demo, small: it checks its own results and raises where they are not right."""

from __future__ import annotations

import logging
import os
import pty
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))

from tools.demo_parts import results, screen  # noqa: E402
from tools.demo_parts.job import Run, State  # noqa: E402


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


def run_python(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_threads_are_set_before_torch_reads_them():
    code = (
        "import sys; from tools.demo import set_threads; assert 'torch' not in sys.modules\n"
        "set_threads({}); import os, torch; print(torch.get_num_threads(), os.environ)"
    )
    said = run_python(code.format(1))
    assert said.startswith("1 ") and "'OMP_WAIT_POLICY': 'passive'" in said
    code = "from tools.demo import set_threads; set_threads(1); import os; print(os.environ)"
    said = run_python(code, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="active")
    assert "'OMP_NUM_THREADS': '2'" in said and "'OMP_WAIT_POLICY': 'active'" in said


def test_a_pipe_gets_lines_while_the_work_goes_on(capsys):
    with screen.Screen(every=0.05) as shown, shown.doing("training", 40) as step:
        for number in range(10):
            time.sleep(0.03)
            step(f"loss {number}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert "training: step " in lines[-1] and " of 40, loss " in lines[-1]
    assert lines[-1].endswith(" left")


def test_a_pipe_gets_no_lines_when_there_is_no_need(capsys):
    with screen.Screen() as shown, shown.doing("training", 3) as step:
        step()
        time.sleep(0.3)
    assert not capsys.readouterr().out


def test_what_is_left():
    work = screen._Work("training", 10, done=4, note="loss 2.5", began=time.monotonic() - 20)
    assert work.state() == "step 4 of 10, loss 2.5, about 30 s left"
    work.began -= 780
    assert work.state().endswith("about 20 min left")


LONG = State("load_in_4bit, stock", 57_982_058_496, 3_123_456_789, 123_456_789, 12.345)


def test_tables_and_lines_fit_80_columns(capsys):
    run = Run([LONG, LONG, LONG])
    with screen.Screen() as shown:
        shown.show(results.table(run))
        shown.say("words " * 40 + "model.layers.0.mlp.experts.gate_up_proj[0]" * 4)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "load_in_4bit, stock" in said and "54.0 GiB" in said and "12.345" in said
    assert "\n   words" in said and "gate_up_proj[0]" in said  # no markup


@pytest.mark.parametrize("columns", [80, 34, 12])
def test_a_terminal_shows_a_bar_also_a_narrow_one(columns):
    """In a process with a terminal of its own."""
    code = (
        "import time\nfrom tools.demo_parts.screen import Screen\n"
        "with Screen() as shown:\n shown.say('hello there')\n"
        " with shown.doing('training', 8) as step:\n"
        "  for n in range(6): time.sleep(0.2); step('loss 1.234')\n"
    )
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}
    parent, child = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=child, stderr=child
    )
    os.close(child)
    said = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(parent)
    text = said.decode(errors="replace")
    assert running.wait() == 0, text
    assert "hello" in text and "Traceback" not in text
    if columns == 80:
        assert " of 8, loss 1.234, about" in text and " left" in text


def test_smooth():
    assert results.smooth([2.0] * 9) == pytest.approx([2.0] * 9)
    noisy = [10 - 0.1 * n + (-1) ** n for n in range(90)]
    curve = results.smooth(noisy)
    assert all(abs(curve[n] - (10 - 0.1 * n)) < 0.1 for n in range(15, 75))


def test_interrupting_it_ends_it_with_one_line(tmp_path, demo, capsys, monkeypatch):
    def interrupted(self: screen.Screen, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(screen.Screen, "doing", interrupted)
    assert demo("--quick", "--out", tmp_path) == 130
    said, errors = capsys.readouterr()
    assert said.splitlines()[-1] == "Stopped."
    assert not errors
