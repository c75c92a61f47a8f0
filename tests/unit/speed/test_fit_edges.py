"""`fit_memory` with batches and models that are not those of every day."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_qlora.memory import levels
from tests.helpers.fitting import (
    BATCH,
    SEQ,
    adapted,
    equal,
    fitted,
    least_memory,
    measured_peak,
    token_ids,
    train,
)


def two_backwards(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of two numbers of one forward, each with a backward of its own."""
    model.zero_grad()
    logits = model(input_ids=ids).logits.log_softmax(-1)
    found = []
    for part in (logits[:, ::2].square().mean(), logits[:, 1::2, 3].mean()):
        part.backward(retain_graph=True)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return found


def test_two_backwards_of_one_forward() -> None:
    """A recomputation that ended early has left what the next one must not take for its own."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    model = adapted("deepseek_v3", **wide)
    ids = token_ids(model, seq=24)
    expected = two_backwards(model, ids)
    with fitted(model, seq_len=24) as fit:
        for level in levels.EVERY:
            for layer in fit._runners.values():
                layer.level = level
            found = two_backwards(model, ids)
            for mine, other in zip(found, expected, strict=True):
                assert mine.keys() == other.keys() and len(mine) > 4
                assert all(torch.equal(grad, other[name]) for name, grad in mine.items()), level


@pytest.mark.parametrize(
    "model_type", ["deepseek_v4", pytest.param("hy_v4", marks=pytest.mark.nightly)]
)
def test_streams_of_hidden_states_are_no_tokens(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(model_type)
    ids, ran = token_ids(model), 0

    def count(*_: Any) -> None:
        nonlocal ran
        ran += 1

    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_hook(count)
    with caplog.at_level(logging.WARNING), fitted(model) as fit:
        assert {layer.activations for layer in fit.layers} == {"keep"}
        ran = 0
        train(model, ids, 1)
        assert ran == len(fit.layers)
        assert measured_peak(model, ids) <= fit.peak * 1.001
    assert "were promised" not in caplog.text


@pytest.mark.parametrize("shape", [(1, BATCH * SEQ), (BATCH, SEQ + 1), (BATCH + 1, SEQ)])
def test_more_or_longer_sequences_are_computed_again(
    shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted("gpt_oss")
    ids = token_ids(model, *shape)
    expected = train(adapted("gpt_oss"), ids, 1)
    ran: list[str] = []
    layer = model.get_base_model().model.layers[0]
    layer.mlp.router.register_forward_hook(lambda *_: ran.append("router"))
    with caplog.at_level(logging.WARNING), fitted(model):
        ran.clear()
        train(model, token_ids(model), 1)
        assert len(ran) == 1 and "were promised" not in caplog.text
    model = adapted("gpt_oss")
    with caplog.at_level(logging.WARNING), fitted(model):
        assert equal(train(model, ids, 1), expected)
        assert measured_peak(model, ids) <= least_memory(adapted("gpt_oss"), *shape)
    assert caplog.text.count("were promised") == 1
    assert ("sequences of 96 tokens, and 48 were" in caplog.text) == (shape[0] == 1)


def test_an_old_choice_does_not_undo_a_newer_one() -> None:
    model = adapted(num_hidden_layers=4)
    least = least_memory(model)
    with fitted(model) as old:
        old.remove()
        new = fitted(model, least)
    assert "recompute" in {layer.activations for layer in new.layers}
    assert measured_peak(model, token_ids(model)) <= least
    new.remove()
    assert not any("forward" in vars(layer) for layer in model.get_base_model().model.layers)


def test_a_copy_of_a_fitted_model_keeps_as_much() -> None:
    model = adapted()
    ids = token_ids(model)
    expected = train(adapted(), ids, 1)
    with fitted(model, least_memory(model)):
        copied = copy.deepcopy(model)
    assert equal(train(copied, ids, 1), expected)
    assert measured_peak(copied, ids) <= least_memory(model)
