"""A training step on meta runs once for all plans that take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_qlora.planning.budget import Settings
from moe_qlora.planning.planner import Planner
from moe_qlora.planning.search import _SHARED

_known: dict[str, Any] = {}
_run, _ready = Planner._run_step, Planner._ready


def _key(planner: Planner, *others: Any) -> str:
    source = planner.source
    settings = replace(planner.settings, **{name: getattr(Settings(), name) for name in _SHARED})
    named = (source.config.to_json_string(), source.quantization, source.native, settings)
    return repr((*named, planner.lora_config, planner.card, *others))


@pytest.fixture
def steps_run_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Plans that differ in devices, engines and optimizers share a model and its steps.

    A workspace that a smaller cap holds is the same under it. Returns what is known.
    """

    def run(self: Planner, batch: int, seq: int, cap: int, level: str | None = None) -> Any:
        known = _known.setdefault(_key(self, self.meta.skeleton is None, batch, seq, level), {})
        for other, found in known.items():
            if found[1] <= cap <= other:
                return found
        known[cap] = found = _run(self, batch, seq, cap, level)
        return found

    def ready(self: Planner, skeleton: Any) -> Any:
        key, before = _key(self, skeleton is None), len(self.notes)
        if key not in _known:
            _known[key] = _ready(self, skeleton), self.eager, self.notes[before:]
        meta, self.eager, notes = _known[key]
        self.notes[before:] = notes
        return meta

    monkeypatch.setattr(Planner, "_run_step", run)
    monkeypatch.setattr(Planner, "_ready", ready)
    return _known
