"""The pages that scripts write say what their data says."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import moe_qlora
from moe_qlora.cli.app import app

ROOT = Path(__file__).parents[3]
MODELS = (
    *("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3-235b-a22b"),
    *("mixtral-8x7b", "glm-4.5-air", "deepseek-v3"),
)
PERCENTILES = ("p20", "p50", "p80")
QUICK = ("mixtral-8x7b", "qwen3-30b-a3b")
"""Models that are planned in the shortest time."""


@pytest.fixture
def script(monkeypatch):
    """Import a script of tools/bench."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    return importlib.import_module


def test_the_page_of_speed_is_what_its_script_writes(script):
    how_fast = script("how_fast")
    assert how_fast.PAGE.read_text(encoding="utf-8") == how_fast.text(), "run how_fast.py again"


def test_the_page_of_speed_can_show_what_the_table_of_what_fits_measures(script, monkeypatch):
    how_fast, fit_table, pages = map(script, ("how_fast", "fit_table", "pages"))
    model = script("model")
    figures = {"model": 1e9, "throughput": 2e4, "peak in training": 3e9, "planned peak": 3.1e9}
    figures |= {"reserved in training": 3.2e9, **dict.fromkeys(how_fast.KINDS.values(), 16)}
    start = {"date": "2026-01-02", "commit": "abc", "gpu": "NVIDIA H200", "name": how_fast.QWEN}
    options = SimpleNamespace(device="cuda", out="x", tiny=False, layers=None)
    options.commit = options.profile = None
    rows = []
    for number, case in enumerate(fit_table.CASES):
        monkeypatch.setattr("sys.argv", fit_table.command(case, options)[2:])
        asked = model._options()
        if asked.model == how_fast.QWEN:
            with monkeypatch.context() as environment:
                for key, value in (fit_table.EXPANDABLE if case.expandable else {}).items():
                    environment.setenv(key, value)
                setting = model._setting(case.peer, asked, 48)
            case_figures = figures | {"throughput": 20000 + number}
            rows += [
                {**start, "setting": setting, "metric": metric} | dict.fromkeys(PERCENTILES, value)
                for metric, value in case_figures.items()
            ]
    stored = pages.rows_of
    new = {"model.csv": tuple(rows)}
    monkeypatch.setattr(pages, "rows_of", lambda file: stored(file) + new.get(file, ()))
    before = how_fast.text()
    for name in ("WHOLE", "LIMITED"):
        monkeypatch.setattr(how_fast, name, "abc")
    text, speeds = (
        how_fast.text(),
        {c.name: f"{20000 + n:,}" for n, c in enumerate(fit_table.CASES)},
    )
    for name in (
        "one",
        "one-frozen",
        "four-55.8GiB",
        "four-frozen-recomputed",
        "one-28GiB",
        "one-24GiB",
    ):
        assert speeds[name] in text and speeds[name] not in before, name
    assert f"| 28 GiB | 16 | 16 | 16 | 3.1 GB | 3.0 GB | 3.2 GB | {speeds['one-28GiB']} |" in text
    block = how_fast.readme_block()
    assert "torch.compile" in block and "(commit abc)" in block
    assert f"|3.0 GB|{speeds['one']}|3.0 GB|{speeds['four-55.8GiB']}|" in block


def test_figures_are_looked_up_by_what_was_run(script, monkeypatch):
    pages = script("pages")
    start = {"date": "2026-01-02", "commit": "abc", "gpu": "NVIDIA H200", "name": "model"}

    def row(setting, metric, value):
        return {**start, "setting": setting, "metric": metric, "p20": 1, "p50": value, "p80": 9}

    rows = [
        row("peer=ours batch=1", "throughput", "2000.5"),
        row("peer=ours batch=1", "peak in training", "1.5e9"),
        row("peer=ours batch=1 cap=2", "throughput", 3),
    ]
    monkeypatch.setattr(pages, "rows_of", lambda file: rows)
    run = pages.find("model.csv", "abc", "model", "peer=ours batch=1", ["cap"])
    assert (run.peak, run.speed, run.spread) == ("1.5 GB", "2,000", "1 to 9")
    said = pages.source([run])
    assert "commit abc, 2026-01-02, one NVIDIA H200" in said
    with pytest.raises(LookupError, match="peer=frozen: no run"):
        pages.find("model.csv", "abc", "model", "peer=frozen")
    with pytest.raises(LookupError, match="cap=2"):  # two runs have these words
        pages.find("model.csv", "abc", "model", "peer=ours")
    rows.append(row("peer=ours batch=1", "throughput", 4))
    with pytest.raises(LookupError, match="was run twice"):
        pages.find("model.csv", "abc", "model", "peer=ours batch=1", ["cap"])
    other = pages.Run("model.csv", {**run.where, "commit": "def"})
    with pytest.raises(LookupError, match="several runs"):
        pages.source([run, other])


def test_a_block_of_a_document_is_replaced(script):
    pages = script("pages")
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    new = pages.filled(text, "x", r"new \1")
    assert new == "a\n<!-- x: begin -->\n\nnew \\1\n\n<!-- x: end -->\nb\n"
    assert pages.filled(new, "x", r"new \1") == new
    with pytest.raises(LookupError, match="no place for y"):
        pages.filled(text, "y", "new")


@pytest.fixture
def fits(script):
    return script("what_fits")


def test_the_page_of_memory_is_what_its_script_writes(script):
    page = script("what_fits_page")
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run what_fits.py --write-only"


@pytest.mark.parametrize(
    ("name", "module"), [("what-fits", "what_fits_page"), ("how-fast", "how_fast")]
)
def test_the_readme_shows_what_the_pages_say(script, name, module):
    pages = script("pages")
    readme = pages.README.read_text(encoding="utf-8")
    assert readme == pages.filled(readme, name, script(module).readme_block()), "run it again"


def test_there_is_a_cell_for_each_model_gpu_and_length(fits):
    cells = [(cell.model, cell.seq, cell.gpus) for cell in fits.read()]
    assert tuple(fits.MODELS) == MODELS
    assert cells == [*itertools.product(fits.MODELS, fits.SEQS, fits.GPUS.values())]


def some(fits):
    """A cell of three models and of each quick one; others once the data is planned anew."""
    chance = random.Random(str(fits.described()))
    by_model = {name: [c for c in fits.read() if c.model == name] for name in fits.MODELS}
    return [chance.choice(by_model[name]) for name in sorted({*chance.sample(MODELS, 3), *QUICK})]


def test_some_cells_are_what_plan_says(fits):
    for cell in some(fits):
        report = moe_qlora.plan(cell.model, search=False, **cell.arguments())
        use = max(report.devices, key=lambda use: use.needed)
        assert (report.fits, use.needed, use.peak.nbytes) == (True, cell.needed, cell.peak), cell


def test_the_command_of_a_cell_says_the_same(fits):
    cell = next(cell for cell in fits.read() if cell.model == QUICK[0] and not cell.fits)
    run = CliRunner().invoke(app, [*shlex.split(cell.command())[1:], "--json"])
    said = json.loads(run.stdout)
    assert (said["fits"], said["devices"][0]["peak"]["nbytes"]) == (True, cell.peak)


def test_a_cell_has_the_first_setting_that_fits(fits, monkeypatch):
    planned = fits.Planned("model")
    asked = []

    def takes(letter, engine, seq, devices, card):
        asked.append((letter, engine))
        return (letter, engine) in enough

    monkeypatch.setattr(planned, "fits", takes)
    monkeypatch.setattr(planned, "least", lambda *asked: 7)
    monkeypatch.setattr(planned, "_cell", lambda *cell: cell)
    enough = {("B", "fsdp"), ("C", "ddp")}
    assert planned.cell("2xH200", 64) == ("2xH200", 64, "B", "fsdp", 0)
    assert asked == [("A", "ddp"), ("A", "fsdp"), ("B", "ddp"), ("B", "fsdp")]
    enough = {("E", "")}
    assert planned.cell("H200", 64) == ("H200", 64, "E", "", 0)
    enough = {("G", "ddp"), ("H", "")}
    assert planned.cell("H200", 64) == ("H200", 64, "H", "", 0)
    assert planned.cell("2xH200", 64) == ("2xH200", 64, "F", "fsdp", 7)
    enough = set()
    assert planned.cell("H200", 64) == ("H200", 64, "H", "", 7)
    assert planned.cell("2xH200", 64) == ("2xH200", 64, "F", "fsdp", 7)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_is_what_is_planned_now(fits, model):
    planned = fits.Planned(model)
    for cell in fits.read():
        if cell.model == model:
            assert planned.cell(cell.gpus, cell.seq) == cell


@pytest.mark.nightly
def test_measured_runs_are_planned_as_the_page_says(fits):
    assert [*fits.checks()] == fits.read_checks()
