"""What a layer keeps on each level: its gradients, and how often its parts run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moe_qlora.memory.choice import LEVELS
from moe_qlora.memory.levels import compute


class Counts(TorchDispatchMode):
    """Counts attentions; in backward, operators run in the thread that this mode is active in."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[func.name().partition(".")[0].removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def gradient(level, layer, x):
    x = x.clone().requires_grad_()
    with Counts() as counts:
        compute(level, layer, (x,), {}).square().sum().backward()
    return x.grad, counts.runs


def attention(x):
    heads = torch.tanh(x).view(2, 3, 5, 4)
    return torch.sin(F.scaled_dot_product_attention(heads, heads.cos(), heads.sin())).reshape(-1)


@pytest.mark.parametrize("level", LEVELS)
def test_attention_runs_once_where_it_is_kept_and_gradients_are_the_same(level):
    x = torch.randn(120)
    expected, _ = gradient("keep", attention, x)
    found, runs = gradient(level, attention, x)
    assert torch.equal(found, expected)
    attentions = runs["_scaled_dot_product_flash_attention_for_cpu"]
    assert attentions == (1 if level in ("attention", "keep") else 2)
    assert runs["tanh"] == (1 if level == "keep" else 2)


def test_a_recomputation_may_call_operators_that_the_forward_did_not():
    """A workspace that another layer took meanwhile is cut into views anew."""
    calls = []

    def layer(x):
        calls.append(x)
        for _ in range(len(calls)):
            x = x.view(8, 15).view(120)
        return attention(torch.exp(x) if len(calls) == 2 else x.exp())

    x = torch.randn(120)
    expected, _ = gradient("keep", lambda x: attention(x.exp()), x)
    assert torch.equal(gradient("attention", layer, x)[0], expected)
    assert len(calls) == 2
