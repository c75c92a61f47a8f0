"""Folders that earlier versions wrote load, resume, merge and export as they did then."""

import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
VERSIONS = sorted((ROOT / "tests/fixtures").iterdir())


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_folders_of_earlier_versions(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    corpus = importlib.import_module("tools.corpus")
    fixtures = importlib.import_module("tools.corpus_fixtures")
    recorded = json.loads((folder / "numbers.json").read_text())
    recorded.pop("commit", None)
    # bitsandbytes would compile its generic kernel anew for each shape.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Trainer, about its own settings
        seen = fixtures.read_fixtures(folder)
    assert list(corpus.differences(recorded, seen, corpus.TOLERANCE)) == []
