"""What the losses of other training objectives take, against a count of the tensors of a step."""

from __future__ import annotations

from typing import Any

import pytest

from moe_qlora.integrations import host as objectives
from tests.helpers.fitting import adapted, fitted, measured_peak, token_ids


@pytest.mark.parametrize("objective", ["sft", "dpo", "one of tomorrow"])
def test_the_memory_of_a_loss_is_planned(objective: str) -> None:
    model = adapted(vocab_size=2048)
    ids = token_ids(model)
    loss: Any = objectives.loss_of(objective)
    more = {} if loss is None else {"loss": loss}
    with fitted(model, **more) as fit:
        assert fit.peak == pytest.approx(measured_peak(model, ids, loss_of=loss or own), rel=0.03)


def own(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss
