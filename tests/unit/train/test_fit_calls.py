"""`fit_memory` on a CPU: what it refuses, what it leaves alone, and the calls that models get."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from moe_qlora.errors import ConfigError
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from moe_qlora.train import fit as fit_module
from tests.helpers import training
from tests.helpers.fitting import (
    BATCH,
    SEQ,
    adapted,
    equal,
    fill,
    fitted,
    least_memory,
    measured_peak,
    on_level,
    token_ids,
    train,
    with_lora,
)


def half(model: Any) -> int:
    """A memory in which layers keep part of their activations."""
    with fitted(model) as fit:
        most = fit.peak
    return (least_memory(model) + most) // 2


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((adapted, {"memory": m}, "memory is") for m in (0, "abc", "", True, -5, 1.5, [1], None)),
    *((adapted, {"batch_size": size}, "batch_size is") for size in (0, True, "2", None)),
    (adapted, {"seq_len": -1}, "seq_len is"),
    (adapted, {"memory": "24"}, r"is a number of bytes; write .*24GiB"),
    (adapted, {"memory": 24}, r'\d+ bytes are missing.*write "24GiB"'),
    (adapted, {"loss": "dpo"}, "loss is 'dpo'; give a function"),
    (lambda: nn.Linear(3, 3), {}, "Linear has no decoder layers"),
    (lambda: tiny_model("qwen3_moe", device="meta"), {}, "is on meta"),
    (lambda: tiny_model("qwen3_moe").requires_grad_(False), {}, "no weight of the model is train"),
    (
        lambda: tiny_model("qwen3_omni_moe_talker_text"),
        {},
        "token ids, on which Qwen3OmniMoeTalkerModel does not",
    ),
]


def test_what_cannot_be_fitted_is_said() -> None:
    for make, how, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            fitted(make(), **how)
    model = adapted()
    least = least_memory(model)
    with pytest.raises(ConfigError, match=r"\b1 bytes are missing"):
        fitted(model, least - 1)
    with fitted(model, least), pytest.raises(ConfigError, match=r"call remove\(\)"):
        fitted(model)
    fitted(model).remove()


def everything(model: nn.Module) -> dict[str, Any]:
    """The state that `fit_memory` must not change."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    tensors |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors["rng"] = torch.get_rng_state()
    found: dict[str, Any] = {name: tensor.tolist() for name, tensor in tensors.items()}
    said = {"_moe_qlora_announcement", "_moe_qlora_adapters_seen"}  # by the first forward
    for name, m in model.named_modules():
        found[f"{name}()"] = {*vars(m)} - said, m.training, vars(m).get("gradient_checkpointing")
    return found | {"trained": [p.requires_grad for p in model.parameters()]}


@pytest.mark.parametrize("end", ["removed", "too small", "interrupted"])
def test_the_model_is_as_before(end: str) -> None:
    model = adapted()
    del model.equal_models  # It is measured here
    model.gradient_checkpointing_enable()
    layers = model.get_base_model().model.layers
    model.eval()
    layers[0].train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    before = everything(model)
    if end == "removed":
        with fitted(model, half(model)):
            assert not layers[0].gradient_checkpointing
    elif end == "too small":
        with pytest.raises(ConfigError, match="missing"):
            fitted(model, 1)
    else:
        calls = []

        def interrupt(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), layers[-1].register_forward_pre_hook(interrupt):
            fitted(model)
    assert everything(model) == before


def test_evaluation_and_generation_run_as_before() -> None:
    model, plain = adapted(), adapted()
    ids = token_ids(model)

    def results(model: Any) -> list[Tensor]:
        model.get_base_model().config.use_cache = True
        outs = []
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad():
                outs.append(model(input_ids=ids).logits)
                cache = model(input_ids=ids, use_cache=True).past_key_values
                assert cache.get_seq_length() == SEQ
            start = {"input_ids": ids[:, :5], "max_new_tokens": 5, "pad_token_id": 0}
            outs.append(model.generate(**start, do_sample=False))
        with model.disable_adapter():
            outs.append(model(input_ids=ids).logits)
        model.train()
        return outs

    with fitted(model, half(model)):
        pairs = zip(results(model), results(plain), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert equal(train(model, ids), train(plain, ids))


def cached(model: Any, ids: Tensor, static: bool) -> Any:
    """A cache that holds all tokens but the last six."""
    config = model.get_base_model().config
    cache = StaticCache(config=config, max_cache_len=SEQ) if static else DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=ids[:, :-6], past_key_values=cache)
    return cache


@pytest.mark.parametrize(("model_type", "static"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_tokens_after_a_cached_prefix(model_type: str, static: bool) -> None:
    model = adapted(model_type)
    ids = token_ids(model)

    def steps() -> list[Any]:
        found = []
        for first, last in ((-6, None), (-6, -5)):
            cache = cached(model, ids, static)
            model.zero_grad()
            out = model(input_ids=ids[:, first:last], past_key_values=cache).logits
            out.square().sum().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found += [out.detach(), *grads]
        return found

    wanted = steps()
    with fitted(model, half(model)):
        assert all(map(torch.equal, steps(), wanted))


def losses_of(model: Any) -> list[Tensor]:
    batches = [token_ids(model, seed=seed) for seed in (0, 1)]
    return [model(input_ids=ids, labels=ids).loss for ids in batches]


def two_forwards(model: Any) -> None:
    sum(losses_of(model)).backward()  # type: ignore[union-attr]


def in_bf16(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        two_forwards(model)


def other_adapter(model: Any) -> None:
    if "other" not in model.peft_config:
        model.add_adapter("other", model.peft_config["default"])
        fill(model)
    torch.manual_seed(0)
    for name in ("other", "default"):
        model.set_adapter(name)
        two_forwards(model)


@pytest.mark.parametrize("run", [two_forwards, in_bf16, other_adapter])
def test_gradients_are_those_of_computing_all_again(run: Callable[[Any], None]) -> None:
    """With dropout, which draws the same numbers again."""

    def model() -> Any:
        model = with_lora(adapted().unload(), dropout=0.2)
        model.equal_models = "with dropout"
        return model

    def gradients(model: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        run(model)
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    checkpointed, ours = model(), model()
    checkpointed.gradient_checkpointing_enable()
    expected = gradients(checkpointed)
    with fitted(ours, half(ours)):
        got = gradients(ours)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
def test_compiled_layers_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model, plain = adapted(num_hidden_layers=1), adapted(num_hidden_layers=1)
    ids = token_ids(model)
    memory = half(model)
    (layer,) = model.get_base_model().model.layers
    layer.compile()
    with fitted(model, memory):
        torch._dynamo.reset()
        counters.clear()
        losses, _ = train(model, ids)
        assert counters["stats"]["unique_graphs"] > 0
    assert losses == pytest.approx(train(plain, ids)[0], rel=1e-5)
    assert layer._compiled_call_impl is not None


def test_what_is_fitted_wins_over_a_trainers_checkpointing(tmp_path: Path) -> None:
    def losses(model: Any) -> list[float]:
        options = training.four_steps(tmp_path, 1, use_cpu=True, gradient_checkpointing=True)
        trainer = training.trainer_of(model, options)
        trainer.train()
        return training.logged_losses(trainer)

    expected = losses(adapted(vocab_size=256))
    model = adapted(vocab_size=256)
    layers = model.get_base_model().model.layers
    with fitted(model, batch_size=12, seq_len=8):
        assert losses(model) == expected
        assert not any(layer.gradient_checkpointing for layer in layers)
    assert all(layer.gradient_checkpointing for layer in layers)


def test_on_cuda_there_is_room_for_gaps_and_for_the_pool_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By arithmetic alone: the model itself is on a CPU."""
    segments = [{"is_expandable": False}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert fit_module._gaps() == 0.04
    segments.append({"is_expandable": True})
    assert fit_module._gaps() == 0.02
    with fitted(adapted()) as fit:
        activities = fit._activities[levels.RECOMPUTE]
        peak = fit._needed(activities)
        fit._gaps = 0.04
        assert fit._needed(activities) == int(peak * 1.04)
        monkeypatch.setattr(fit, "_device", torch.device("cuda"))
        record(fit)
        assert fit._needed(activities) > (peak + (256 << 20)) * 1.04
        monkeypatch.undo()


class _Graphs:
    """Stands for `LayerGraphs`, and records nothing."""

    def run(self, runner: Any, level: str, args: Any, kwargs: Any) -> Any:
        return runner.compute(level, args, kwargs)


def record(fit: Any) -> None:
    graphs: Any = _Graphs()
    for runner in fit._runners.values():
        runner.graphs = graphs


@pytest.mark.parametrize(
    ("over", "reserved", "said"),
    [(1.02, 1.1, None), (1.05, 1.1, "between tensors.*fewer\\)\\."), (1.0, 1.3, "give memory=")],
    ids=["near", "over the plan", "over the memory"],
)
def test_first_steps_that_take_more_than_was_planned_are_said(
    over: float,
    reserved: float,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = adapted()
    with fitted(model) as fit:
        most = fit.peak
    given: list[None] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(over * most))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int(reserved * most))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(None))
    with fitted(model, int(1.2 * most)) as fit:
        record(fit)
        for _ in range(5):
            fit._check_first_steps()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for _ in range(2):
            optimizer.step()
        assert len(given) == 1  # Before an optimizer's first step
    found = [text for text in caplog.messages if "the first steps took" in text]
    assert len(found) == (said is not None)
    assert all(re.search(str(said), text) for text in found)


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


@pytest.mark.parametrize("name", ["past_key_values", "cache", "any"])
def test_a_cache_has_several_names(name: str) -> None:
    """transformers 5.24 calls a layer's `past_key_values` `cache`."""
    config = tiny_model("qwen3_moe").config
    seen: list[Any] = []

    class Layer(GradientCheckpointingLayer):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            seen.append(kwargs.get(name))
            return x

    layer, full, x = Layer(), DynamicCache(config=config), torch.ones(1, 2, 4, requires_grad=True)
    full.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1)
    empty, encoder = DynamicCache(config=config), EncoderDecoderCache(full, DynamicCache())
    on_level(layer, levels.RECOMPUTE, (1, 2))
    for cache in (full, encoder, StaticCache(config=config, max_cache_len=8), empty, None):
        layer(x, **{name: cache})
    assert seen[:3] == [full, encoder, seen[2]] and seen[2] is not None
    assert seen[3:] == [None, None]
    Layer._can_checkpoint_with_cache = True
    layer(x, **{name: full})
    assert seen[-1] is full


def test_a_copy_of_a_fitted_model_keeps_as_much() -> None:
    model = adapted()
    ids = token_ids(model)
    expected = train(adapted(), ids, 1)
    with fitted(model, least_memory(model)):
        copied = copy.deepcopy(model)
    assert equal(train(copied, ids, 1), expected)
    assert measured_peak(copied, ids) <= least_memory(model)
