"""Plans that differ in devices, engines and optimizers share a model and its steps."""

from dataclasses import replace
from typing import Any

import pytest

from moe_qlora.planning import plan
from moe_qlora.planning.budget import Settings
from moe_qlora.planning.planner import Planner

_known: dict[str, Planner] = {}


@pytest.fixture
def steps_run_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, Planner]:
    """Make planners of what is known already from the first of them; return these."""

    def planner(source: Any, settings: Settings, *others: Any) -> Planner:
        plain = {name: getattr(Settings(), name) for name in plan._SHARED}
        model = (source.config.to_json_string(), source.quantization, source.native)
        key = repr((*model, replace(settings, **plain), *others))
        known = _known.setdefault(key, Planner(source, settings, *others))
        return known.with_settings(settings)

    monkeypatch.setattr(plan, "Planner", planner)
    return _known
