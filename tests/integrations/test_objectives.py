"""What the losses of other training objectives take, against a count of the tensors of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

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


def test_log_probabilities_are_those_of_the_labels() -> None:
    model = adapted()
    ids = token_ids(model)
    labels = ids.clone()
    labels[0, :7] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    found = objectives.log_probabilities(model, batch)
    wanted = F.log_softmax(model(input_ids=ids).logits.double(), -1)
    for row, column in ((0, 6), (0, 30), (1, 0)):
        one = wanted[row, column, ids[row, column + 1]]
        torch.testing.assert_close(found[row, column].double(), one, rtol=1e-5, atol=1e-5)
    assert not found[0, :6].any() and found.shape == (2, ids.shape[1] - 1)


def test_the_reference_is_the_model_without_adapters() -> None:
    model = adapted()
    ids = token_ids(model)
    batch = {"input_ids": ids, "labels": ids}
    loss: Any = objectives.loss_of("dpo")
    with model.disable_adapter(), torch.no_grad():
        reference = objectives.log_probabilities(model, batch).mean()
    gained = objectives.log_probabilities(model, batch).mean() - reference
    torch.testing.assert_close(loss(model, batch), gained)
    assert gained.abs() > 1e-6
