"""Folders that earlier versions wrote load, resume, merge and export as they did then."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = sorted((ROOT / "tests/fixtures").iterdir())


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_folders_of_earlier_versions(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    corpus = importlib.import_module("tools.corpus")
    fixtures = importlib.import_module("tools.corpus_fixtures")
    recorded = json.loads((folder / "numbers.json").read_text())
    del recorded["commit"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Trainer, about its own settings
        seen = fixtures.read_fixtures(folder)
    assert list(corpus.differences(recorded, seen, corpus.TOLERANCE)) == []


def test_differences_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    corpus = importlib.import_module("tools.corpus")
    one = {"keys": "a", "flag": True, "loss": 2.0, "gradients": {"w": [3.0, -1.0], "v": [1.0, 0.0]}}
    assert list(corpus.differences(one, json.loads(json.dumps(one)), 1e-3)) == []
    for field, value in (("keys", "b"), ("flag", False), ("loss", 2.1), ("loss", float("nan"))):
        assert [row[0] for row in corpus.differences(one, one | {field: value}, 1e-3)] == [field]
    swapped = one | {"gradients": {"w": [3.0, 1.0], "v": [1.0, 0.0005]}}
    assert [row[0] for row in corpus.differences(one, swapped, 1e-3)] == ["gradients.w"]
    lost = one | {"gradients": {"w": [3.0, -1.0]}}
    assert [row[0] for row in corpus.differences(one, lost, 1e-3)] == ["gradients.v"]
    plan = {"plan": {"peak": {"nbytes": 1000}, "fit": {"keep": 2}}}
    near, far = ({"plan": {"peak": {"nbytes": n}, "fit": {"keep": 2}}} for n in (1020, 1050))
    assert list(corpus.differences(plan, near, 1e-3)) == []
    assert [row[0] for row in corpus.differences(plan, far, 1e-3)] == ["plan.peak.nbytes"]
