"""The tables that what_fits.py writes say what its data and `plan` say."""

from __future__ import annotations

import importlib
import itertools
import random
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools/bench"


@pytest.fixture
def fits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("what_fits")


@pytest.mark.parametrize("name", ["PAGE", "README"])
def test_tables_are_what_the_script_writes(fits, name):
    page = getattr(fits, name)
    assert page.read_text(encoding="utf-8") == fits.filled(page), "run what_fits.py --models"


def test_there_is_a_cell_for_each_model_gpu_and_length(fits):
    assert len(fits.MODELS) == 10
    keys = itertools.product(fits.MODELS, fits.SEQS, fits.GPUS.values())
    assert [*fits.read()] == [(model, gpus, seq) for model, seq, gpus in keys]


def is_planned(fits, cell):
    now = fits.planned(*cell[:3])
    letters = (cell.setting, cell.engine, cell.host, bool(cell.least))
    assert (now.setting, now.engine, now.host, bool(now.least)) == letters, (cell, now)
    assert now.needed == pytest.approx(cell.needed, rel=0.04), (cell, now)


@pytest.mark.parametrize("key", [("mixtral-8x7b", "H100", 4096), ("olmoe-1b-7b", "A6000", 32768)])
def test_some_cells_are_what_plan_says(fits, key):
    is_planned(fits, fits.read()[key][0])


@pytest.mark.nightly
def test_a_cell_of_each_model_is_what_plan_says(fits):
    cells = [cell for cell, _ in fits.read().values()]
    chance = random.Random(str(cells))  # others once the data is planned anew
    for model in fits.MODELS:
        is_planned(fits, chance.choice([cell for cell in cells if cell.model == model]))
