"""`torch.topk` within compiled decoder layers: by our kernel, with torch's results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_qlora.memory import levels
from moe_qlora.speed import top_k
from moe_qlora.speed.fitted import FittedLayer, runner
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the operator is called with; on a CPU too."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(top_k, "_is_on_device", lambda x: True)
    kernel = top_k.top_k

    def counting(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shapes.append((*x.shape, k))
        return kernel(x, k)

    monkeypatch.setattr(top_k, "top_k", counting)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    levels._compiled_part.cache_clear()
    torch._dynamo.reset()
    return shapes


def every_way(x: Tensor) -> list[Tensor]:
    values, index = torch.topk(x, 2, dim=-1, sorted=False)
    return [values, index, x.topk(3)[0], torch.topk(x, k=1).indices, torch.topk(x, 4, 1)[0]]


def check(function: Callable[[Tensor], list[Tensor]]) -> None:
    x = torch.randn(5, 16, requires_grad=True)
    compiled = torch.compile(top_k.with_quick_top_k(function), fullgraph=True)
    results = []
    for each in (compiled, function):
        outs = each(x)
        floats = [out for out in outs if out.is_floating_point()]
        (grad,) = torch.autograd.grad(sum((out**3).sum() for out in floats), x)
        results.append([*outs, grad])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_results_and_gradients_are_those_of_torch(calls: list[Any]) -> None:
    check(every_way)
    assert calls == [(5, 16, 2), (5, 16, 3), (5, 16, 1), (5, 16, 4)]


def others(x: Tensor) -> list[Tensor]:
    wide = x.repeat(1, 100)
    return [
        torch.topk(x, 2, dim=0)[0],
        torch.topk(x, 2, largest=False)[0],
        torch.topk(x.double(), 2)[0],
        torch.topk(wide, 2)[1],
        torch.topk(wide, 20)[0],
    ]


def test_what_the_kernel_does_not_compute_is_left_to_torch(calls: list[Any]) -> None:
    check(others)
    assert not calls


def test_nothing_changes_outside_of_a_compiled_layer(calls: list[Any]) -> None:
    top_k.with_quick_top_k(every_way)
    every_way(torch.randn(3, 8))
    runner(every_way, compiles=False)(levels.KEEP, (torch.randn(3, 8),), {})
    assert not calls


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize("level", levels.EVERY)
def test_a_compiled_model_trains_alike(level: str, calls: list[Any]) -> None:
    model: Any = tiny_model("qwen3_moe").train()
    model.config.use_cache = False
    ids = torch.arange(24).view(2, 12)

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    wanted = step()
    layers = model.model.layers
    for layer in layers:
        layer.compile()
        FittedLayer(layer, level, (2, 12), set())
    got = step()
    # Kept by levels in between, so that a router does not choose anew
    again = 2 if level == levels.RECOMPUTE else 1
    assert len(calls) == again * len(layers)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
