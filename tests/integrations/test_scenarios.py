"""tools/scenarios.py: the page of trainers shows its table."""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/scenarios.py"

PAGE = (ROOT / "moe_qlora/docs/trainers.md").read_text(encoding="utf-8")


def cells(table: str) -> list[list[str]]:
    return [line.strip("| \n").split(" | ") for line in table.splitlines()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet_loading")
def test_the_page_of_trainers_shows_what_the_tool_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--cpu"])
    level = transformers.logging.get_verbosity()
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(TOOL), run_name="__main__")
    transformers.logging.set_verbosity(level)
    out, err = capsys.readouterr()
    head, rule, *rows = cells(out)
    assert head == ["Scenario", "Observed", "Trainable", "Experts", "Bytes"]
    assert rule == ["---"] * 5 and len(rows) == 7
    assert rows == cells(PAGE.partition("| Scenario |")[2].partition("\n\n")[0])[2:]
    told = [line.split() for line in err.splitlines() if ": loss " in line]
    assert len(told) == 7
    for *_, first, arrow, last, _, steps, _ in told:
        assert arrow == "->" and steps == "4"
        assert float(last) < float(first) - 0.02
