"""What `fit_memory` measures of a model on a level serves all of its calls, and equal models."""

from typing import Any

import pytest

from moe_qlora.train.fit import Fit

_of_equal_models = dict[Any, Any]()


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a call's time are steps on levels, and the memory that is given changes none."""
    of_this_test, measure = dict[Any, Any](), Fit._measure

    def once(self: Any, name: str) -> Any:
        model = self._model
        kinds = tuple((p.dtype, p.requires_grad) for p in model.parameters())
        calls = tuple(n for n, module in model.named_modules() if "forward" in vars(module))
        equal = vars(model).get("equal_models")  # Of tests.helpers.fitting.adapted
        known = of_this_test if equal is None else _of_equal_models
        cache = getattr(model.config.get_text_config(), "use_cache", None)
        how = self._sizes, self._loss, self._hosted
        key = (equal or model, cache, *how, kinds, calls, name)
        if key in known and self._device.type == "cpu":  # What a GPU's steps leave there is counted
            self._activities[name] = known[key]
        known[key] = measure(self, name)
        return known[key]

    monkeypatch.setattr(Fit, "_measure", once)
