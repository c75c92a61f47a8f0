"""tools/scenarios.py: the page of trainers shows its table."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/scenarios.py"

PAGE = (ROOT / "moe_qlora/docs/trainers.md").read_text(encoding="utf-8")


def scenarios(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The tool as a program, in this process, which has imported everything."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    level = transformers.logging.get_verbosity()
    with (
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(TOOL), *map(str, arguments)])
        try:
            runpy.run_path(str(TOOL), run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            transformers.logging.set_verbosity(level)
            transformers.logging.enable_progress_bar()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def cells(table: str) -> list[list[str]]:
    return [line.strip("| \n").split(" | ") for line in table.splitlines()]


def test_the_page_of_trainers_shows_what_the_tool_prints():
    done = scenarios("--cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    head, rule, *rows = cells(done.stdout)
    assert head == ["Scenario", "Observed", "Trainable", "Experts", "Bytes"]
    assert rule == ["---"] * 5 and len(rows) == 7
    assert rows == cells(PAGE.partition("| Scenario |")[2].partition("\n\n")[0])[2:]
    told = [line.split() for line in done.stderr.splitlines() if ": loss " in line]
    assert len(told) == 7
    for *_, first, arrow, last, _, steps, _ in told:
        assert arrow == "->" and steps == "4"
        assert float(last) < float(first) - 0.02
