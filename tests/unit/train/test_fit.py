"""`fit_memory` on a CPU: what layers keep, what that takes and computes, and how it is undone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from moe_qlora.errors import ConfigError
from moe_qlora.planning import choice
from moe_qlora.planning.choice import LEVELS
from moe_qlora.train.layers import runner_of
from tests.helpers.fitting import (
    SEQ,
    adapted,
    equal,
    fitted,
    least_memory,
    measured_peak,
    token_ids,
    train,
)


def nested(seen: list[list[int]]) -> bool:
    """Whether no layer keeps less in a later choice."""
    steps = pairwise(seen)
    return all(a <= b for few, more in steps for a, b in zip(few, more, strict=True))


TYPES = {
    "qwen3_moe": {"num_hidden_layers": 3},
    "gpt_oss": {},  # eager attention, with masks of two kinds
    "deepseek_v3": {},  # a dense layer first
    "qwen3_next": {},  # gated delta nets
    "afmoe": {},  # a norm behind the experts
    "gemma4_text": {},
}


@pytest.mark.parametrize(
    ("model_type", "seq"),
    [
        ("qwen3_moe", SEQ),
        *(pytest.param(each, SEQ, marks=pytest.mark.nightly) for each in [*TYPES][1:]),
        ("gpt_oss", 200_000),
    ],
)
def test_no_memory_is_exceeded_and_nothing_else_changes(
    model_type: str, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seq > SEQ:  # On the levels of long sequences
        monkeypatch.setattr(choice, "_LONG", 1)
    model = adapted(model_type, **TYPES[model_type])
    ids = token_ids(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = train(model, ids)
    least = least_memory(model)
    with fitted(model) as fit:
        most = fit.peak
    seen = []
    for memory in (least, (least + most) // 2, most):
        model.load_state_dict(weights)
        with fitted(model, memory) as fit:
            assert fit.memory == memory
            # Which experts tokens choose is not known before: at worst all the same.
            measured = measured_peak(model, torch.zeros_like(ids))
            # Masks of eager attention, which layers that keep all need no more, are planned.
            assert measured <= fit.peak <= min(1.04 * measured, memory)
            assert equal(train(model, ids), before)
            seen.append([LEVELS.index(layer.activations) for layer in fit.layers])
    assert nested(seen)
    assert seen[-1] == [len(LEVELS) - 1] * len(seen[0])


def policy_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A policy's, beside a reference, with entropies of all tokens in fp32."""
    ids = batch["input_ids"]

    def log_probabilities() -> torch.Tensor:
        return model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)

    def of_ids(several: torch.Tensor) -> torch.Tensor:
        return several.gather(-1, ids[:, 1:, None])

    with torch.no_grad(), model.disable_adapter():
        reference = of_ids(log_probabilities())
    now = log_probabilities()
    return (now.exp() * now).sum(-1).mean() - (of_ids(now) - reference).exp().mean()


def test_losses_that_are_not_the_models() -> None:
    """Forwards without gradients come first."""
    model = adapted(num_hidden_layers=3, vocab_size=2048)
    ids = token_ids(model, batch=2)
    least = least_memory(model, 2, loss=policy_loss)
    with fitted(model, batch_size=2, loss=policy_loss) as fit:
        most = fit.peak
        assert {layer.activations for layer in fit.layers} == {"keep"}
    with fitted(model, batch_size=2) as fit:
        assert most > 1.1 * fit.peak
    for memory in (least, (least + most) // 2):
        with fitted(model, memory, batch_size=2, loss=policy_loss) as fit:
            # The ids are counted as soon as an operator returns a view of them.
            measured = measured_peak(model, ids, loss_of=policy_loss) - ids.nbytes
            assert measured <= fit.peak <= min(memory, 1.03 * measured)


def two_forwards(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss + model(**batch).loss


def two_behind_a_frozen_embedding(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        embedded = model.get_input_embeddings()(batch["input_ids"])
    return two_forwards(model, {"inputs_embeds": embedded, "labels": batch["labels"]})


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (two_forwards, r"more than once with gradients.*concatenate"),
        (two_behind_a_frozen_embedding, r"more than once with gradients.*concatenate"),
        (lambda model, batch: 1.0, "loss returned .*float.*give a function"),
        (lambda model, batch: model(**batch).logits, "loss returned .*shape.*give a function"),
        (lambda model, batch: model(**batch).loss.detach(), "loss returned .*requires_grad=False"),
    ],
)
def test_losses_that_cannot_be_measured_are_refused(loss: Any, what: str) -> None:
    model = adapted()
    with pytest.raises(ConfigError, match=what):
        fitted(model, loss=loss)
    with fitted(model) as fit:
        assert fit.layers


def test_layers_that_text_does_not_reach_are_computed_again() -> None:
    """Those of a vision tower: how much they allocate for images is not measured."""
    model = adapted("qwen3_vl_moe")
    ids = token_ids(model)
    before = train(model, ids)
    vision = [m for m in model.modules() if type(m).__name__ == "Qwen3VLMoeVisionBlock"]
    with fitted(model) as fit:
        assert vision and {layer.level for layer in map(runner_of, vision)} == {"recompute"}
        assert {layer.activations for layer in fit.layers} == {"keep"}
        assert all("language_model" in layer.name for layer in fit.layers)
        assert measured_peak(model, ids) <= fit.peak
    again = adapted("qwen3_vl_moe")
    with fitted(again):
        assert equal(train(again, ids), before)
