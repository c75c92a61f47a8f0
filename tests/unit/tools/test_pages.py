"""The pages that scripts write say what their data says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch):
    """Import a script of tools/bench."""
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    return importlib.import_module


def test_the_page_of_speed_is_what_its_script_writes(script):
    how_fast = script("how_fast")
    assert how_fast.PAGE.read_text(encoding="utf-8") == how_fast.text(), "run how_fast.py again"


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


@pytest.mark.parametrize(("name", "module"), [("how-fast", "how_fast")])
def test_the_readme_shows_what_the_pages_say(script, name, module):
    pages = script("pages")
    readme = pages.README.read_text(encoding="utf-8")
    assert readme == pages.filled(readme, name, script(module).readme_block()), "run it again"
