"""The pages that scripts write say what their data says."""

from __future__ import annotations

import csv
import importlib
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_qlora.cli.app import app

ROOT = Path(__file__).parents[3]
QUICK = ("mixtral-8x7b", "qwen3-30b-a3b")
"""Models that are planned in the shortest time."""


@pytest.fixture
def script(monkeypatch):
    """Import a script of tools/bench."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    return importlib.import_module


@pytest.fixture
def fits(script):
    return script("what_fits")


@pytest.mark.parametrize("name", ["PAGE", "BENCHES", "README"])
def test_tables_of_memory_are_what_the_script_writes(script, name):
    page = script("what_fits_page")
    file = getattr(page, name)
    assert file.read_text(encoding="utf-8") == page.filled(file), "run what_fits.py --write-only"


def test_measured_runs_of_the_page_are_rows(fits):
    for check in fits.read_checks():
        with (ROOT / "tools/bench/results" / check.file).open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["commit"] == check.commit]
        peaks = [float(r["p50"]) for r in rows if r.get("metric") == "peak in training"]
        peaks += [1e9 * float(row["train_peak_gb"]) for row in rows if row.get("train_peak_gb")]
        assert check.measured in peaks, check


def test_the_command_of_a_cell_says_the_same(fits):
    cell = next(cell for cell in fits.read() if cell.model == QUICK[0] and not cell.fits)
    run = CliRunner().invoke(app, [*shlex.split(cell.command())[1:], "--json"])
    said = json.loads(run.stdout)
    assert (said["fits"], said["devices"][0]["peak"]["nbytes"]) == (True, cell.peak)
