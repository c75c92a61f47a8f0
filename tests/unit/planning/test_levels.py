"""What a layer keeps on each level: its gradients, and how often its parts run."""

from collections import Counter
from functools import partial
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from moe_qlora.experts.kept import pop_saved, save
from moe_qlora.planning import levels
from moe_qlora.planning.levels import LEVELS, compute


class Counts(TorchDispatchMode):
    """Counts attentions; in backward, operators run in the thread that this mode is active in."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[func.name().partition(".")[0].removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def gradient(level, layer, x, times=1):
    x = x.clone().requires_grad_()
    with Counts() as counts:
        out = compute(level, layer, (x,), {}).square().sum()
        for _ in range(times):
            out.backward(retain_graph=times > 1)
    return x.grad, counts.runs


def attention(x):
    heads = torch.tanh(x).view(2, 3, 5, 4)
    return torch.sin(F.scaled_dot_product_attention(heads, heads.cos(), heads.sin())).reshape(-1)


@pytest.mark.parametrize("level", LEVELS)
def test_attention_runs_once_where_it_is_kept_and_gradients_are_the_same(level):
    def two(x):
        return attention(attention(x))

    x = torch.randn(120)
    expected, _ = gradient("keep", two, x, times=2)
    found, runs = gradient(level, two, x, times=2)
    assert torch.equal(found, expected)
    # A second backward of the same forward computes all again.
    attentions = runs["_scaled_dot_product_flash_attention_for_cpu"]
    assert attentions == {"keep": 2, "recompute": 6}.get(level, 4)
    assert runs["tanh"] == (2 if level == "keep" else 6)


def test_experts_hand_over_what_they_save_unless_it_was_changed_in_place():
    again = []

    def layer(x, change):
        saved = pop_saved()
        again.append(saved is not None)
        if saved is None:
            save(saved := [x.detach() * 3])
        return (saved[0].mul_(2) if change else saved[0]) * x

    x = torch.randn(120)
    for change, level, taken in ((0, "part", True), (0, "attention", False), (1, "part", False)):
        own = partial(layer, change=change)
        expected, _ = gradient("keep", own, x)
        again.clear()
        assert torch.equal(gradient(level, own, x)[0], expected)
        assert again == [False, taken]


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
    assert torch.equal(gradient("part", layer, x)[0], expected)
    assert len(calls) == 2


@pytest.mark.parametrize("level", ["recompute", "part"])
@torch._dynamo.config.patch(recompile_limit=1)
def test_compiled_layers_have_the_same_gradients_by_class(level, monkeypatch):
    """More classes than Dynamo compiles one function for by itself."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    layer, x = torch.nn.Linear(120, 120), torch.randn(120)
    for activation in (torch.sin, F.silu):

        def forward(layer, x, activation=activation):
            return attention(activation(layer(x)))

        run, grads = levels.runner(forward, compiles=True), []
        for out in (run(level, (layer, x), {}), compute(level, forward, (layer, x), {})):
            layer.zero_grad()
            out.square().sum().backward()
            grads.append(layer.weight.grad.clone())
        torch.testing.assert_close(*grads)
    assert counters["stats"]["unique_graphs"] >= 2


def test_lengths_are_never_marked_as_recomputed():
    graph = torch.fx.Graph()
    made = graph.call_function(torch.neg, (length := graph.placeholder("s0"),))
    length.meta["recompute"] = made.meta["recompute"] = True
    levels._lengths_are_saved()(graph)
    assert "recompute" not in length.meta and "recompute" in made.meta


def test_code_for_one_dtype_is_not_run_on_weights_that_were_cast_in_place(monkeypatch):
    # torch 2.11 on Python 3.12 ran it: its guards did not look at parameters seen a call before.
    alike = []

    def dtypes(values):
        return [value.dtype for value in values if isinstance(value, torch.Tensor)]

    def backend(graph, examples):
        compiled_for = dtypes(examples)
        assert not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
        return lambda *args: alike.append(dtypes(args) == compiled_for) or graph(*args)

    def forward(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer.forward(x)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    run = levels.runner(forward, compiles=True)
    for dtype in (torch.float32, torch.bfloat16):
        for weight in chain(*map(torch.nn.Module.parameters, layers)):
            weight.data = weight.data.to(dtype)
        for place in (0, 1, 0, 0):
            run(levels.KEEP, (layers[place], torch.ones(3, 4)), {})
    assert alike == [True] * 8
