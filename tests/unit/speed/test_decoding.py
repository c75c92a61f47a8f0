"""Which cache a recorded token reads and writes, with graphs that run what they recorded again.

The CUDA graph is all that is replaced, so that this runs without a GPU; test_graphs.py has real
ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from emulated_graphs import emulate_tokens
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.cache_utils import StaticCache

from moe_qlora.speed import decoding
from moe_qlora.speed.graphs import LayerGraphs
from moe_qlora.testing import tiny_model


@pytest.fixture(autouse=True)
def rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_tokens(monkeypatch)


def adapted(model_type: str = "qwen3_moe", dropout: float = 0.0) -> Any:
    """A tiny model with LoRA on attention that changes what it computes."""
    model = tiny_model(model_type, seed=0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    torch.manual_seed(1)
    peft_model = get_peft_model(model, config)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return peft_model.eval()


@contextmanager
def graphed(model: Any) -> Iterator[LayerGraphs]:
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    with LayerGraphs(model, layers, compiled=False) as graphs:
        yield graphs


def new_cache(model: Any, length: int = 24, **arguments: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=length, **arguments)


@torch.no_grad()
def feed(model: Any, cache: StaticCache, *tokens: int) -> Tensor:
    ids = torch.tensor([tokens])
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
    return logits


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_conversations_in_turns_with_and_without_the_adapter(model_type: str) -> None:
    """Kinds of calls that share caches, of which several are alive; gpt_oss's windows fill up."""
    turns = [
        *[("a", 8, True), ("a", 9, True), ("a", 10, True), ("a", 8, False), ("a", 9, False)],
        *[("a", 10, False), ("b", 11, False), ("c", 12, True), ("b", 13, False), ("c", 14, True)],
        *[("b", 15, False), ("c", 9, True), ("a", 7, True), *[("a", 5, True)] * 8],
    ]

    def run(model: Any) -> list[Tensor]:
        caches = {name: new_cache(model) for name in "abc"}
        logits = [feed(model, cache, 5, 6, 7) for cache in caches.values()]
        for name, token, on in turns:
            with nullcontext() if on else model.disable_adapter():
                logits.append(feed(model, caches[name], token))
        return logits

    wanted = run(adapted(model_type))
    model = adapted(model_type)
    with graphed(model) as graphs:
        got = run(model)
        assert graphs.recorded == 4
    for turn, ours, right in zip(["", "", "", *turns], got, wanted, strict=True):
        torch.testing.assert_close(ours, right, msg=lambda text, at=turn: f"{at}: {text}")


def test_a_prompt_of_one_token() -> None:
    model = adapted()
    wanted = [feed(model, cache, 3) for cache in [new_cache(model)] for _ in range(4)]
    with graphed(model) as graphs:
        for _ in range(3):
            cache = new_cache(model)
            for right in wanted:
                torch.testing.assert_close(feed(model, cache, 3), right)
        assert graphs.recorded == 2


def test_tokens_have_a_memory_pool_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of training can only be given back when none of its graphs is left."""
    pools: list[object] = []

    def capture(graph: Any, pool: object) -> Any:
        pools.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(decoding, "capture", capture)
    model = adapted()
    with graphed(model) as graphs:
        cache = new_cache(model)
        for token in (5, 6, 7):
            feed(model, cache, token)
        assert pools == [graphs.token_pool] * 2 and graphs.pool is not graphs.token_pool


def test_training_mode_has_recordings_of_its_own() -> None:
    model = adapted(dropout=0.5)
    right = feed(model, new_cache(model), 5, 6, 7), feed(model, new_cache(model), 5, 6, 7, 8)
    with graphed(model):
        for mode in (True, False):
            model.train(mode)
            cache = new_cache(model)
            for token in (5, 6, 7, 8):
                last = feed(model, cache, token)
    torch.testing.assert_close(last, right[1])


def test_lengths_that_go_on_changing_are_recorded_anew() -> None:
    model = adapted()
    with graphed(model) as graphs:
        for length in range(12, 20):
            cache = new_cache(model, length)
            feed(model, cache, 5, 6, 7)
            wanted = feed(copy.deepcopy(model), copy.deepcopy(cache), 8)
            torch.testing.assert_close(feed(model, cache, 8), wanted)
            feed(model, cache, 9)
            assert graphs.recorded <= 8
        assert all(layer.active for layer in graphs._layers)


def test_what_is_not_recorded() -> None:
    model = adapted()
    moved = new_cache(model)
    moved.offloading = True  # its constructor makes a stream: torch for CUDA needs a GPU
    for cache, mode in (
        (moved, torch.no_grad()),
        (new_cache(model), torch.inference_mode()),
        (new_cache(model), torch.enable_grad()),
    ):
        with mode:
            assert not decoding.decodes({"past_key_values": cache})
    with torch.no_grad():
        assert decoding.decodes({"past_key_values": new_cache(model)})
