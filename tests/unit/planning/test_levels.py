"""What a layer keeps on each level: its gradients, and how often its parts run."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts.kept import in_experts, pop_saved, save
from moe_qlora.planning import levels
from moe_qlora.planning.levels import EVERY, compute
from moe_qlora.testing import tiny_model


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


@pytest.mark.parametrize("level", EVERY)
def test_attention_runs_once_where_it_is_kept_and_gradients_are_the_same(level):
    x = torch.randn(120)
    expected, _ = gradient("keep", attention, x)
    found, runs = gradient(level, attention, x)
    assert torch.equal(found, expected)
    attentions = runs["_scaled_dot_product_flash_attention_for_cpu"]
    assert attentions == (2 if level in ("recompute", "experts") else 1)
    assert runs["tanh"] == (1 if level == "keep" else 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("level", EVERY)
def test_outputs_of_linear_layers_are_kept_but_those_of_loras_second_factor(level, bias):
    torch.manual_seed(0)
    base, first = torch.nn.Linear(256, 300, bias=bias), torch.nn.Linear(256, 8, bias=False)
    second = torch.nn.Linear(8, 300, bias=False)

    def layer(x):
        inner = torch.tanh(x).view(5, 256)
        return torch.sin(base(inner) + second(first(inner)) * torch.cos(inner).sum()).flatten()

    x = torch.randn(5 * 256)
    expected, _ = gradient("keep", layer, x)
    found, runs = gradient(level, layer, x)
    assert torch.equal(found, expected)
    _, once = gradient("keep", layer, x)
    # Of 300 and 8 features from 256, "narrow projections" keeps the 8.
    again = {"narrow projections": 2, "projections": 1, "keep": 0}.get(level, 3)
    assert sum(runs[name] - once[name] for name in ("mm", "addmm")) == again


@pytest.mark.filterwarnings("ignore:.*gemm_4bit")
@pytest.mark.parametrize("features", [64, 512])
@pytest.mark.parametrize("level", EVERY)
def test_outputs_of_4_bit_linear_layers_are_kept(level, features):
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(256, features, bias=False, compute_dtype=torch.float32)
    made.to("cpu")

    def layer(x):
        return torch.sin(made(torch.tanh(x).view(5, 256))).flatten()

    x = torch.randn(5 * 256)
    expected, once = gradient("keep", layer, x)
    found, runs = gradient(level, layer, x)
    assert torch.equal(found, expected)
    kept = level in ("projections", "keep") or (level == "narrow projections" and features == 64)
    name = "bitsandbytes::gemm_4bit"
    assert once[name] == 1 and runs[name] == (1 if kept else 2)


def test_what_experts_compute_is_not_kept_as_an_output_of_a_linear_layer():
    """A recomputation does not call it again: its place is another product's."""
    weight = torch.randn(256, 256)
    again = []

    def layer(x):
        x = torch.tanh(x).view(5, 256)
        with in_experts():
            saved = pop_saved()
            again.append(saved is not None)
            if saved is None:
                save(saved := [x.detach() @ weight])
        return torch.sin(torch.sin(x + saved[0]) @ weight.t()).flatten()

    x = torch.randn(5 * 256)
    names = ("projections", "recompute", "attention alone")
    found = [gradient(level, layer, x)[0] for level in names]
    assert again == [False, True, False, False, False, False]
    assert torch.equal(*found[:2]) and torch.equal(*found[1:])


@pytest.mark.parametrize("level", EVERY)
def test_outputs_that_are_kept_may_be_changed_in_place(level):
    """As OLMoE with `clip_qkv` does, hooks, and kernels that no version counter tells of."""
    torch.manual_seed(0)
    base, narrow = torch.nn.Linear(256, 300), torch.nn.Linear(256, 8)

    def layer(x):
        inner = torch.tanh(x).view(5, 256)
        wide = base(inner).clamp_(-0.1, 0.1)
        wide.data.mul_(3)
        heads = inner.view(1, 2, 5, 128)
        out = F.scaled_dot_product_attention(heads, heads, heads)
        return torch.sin(torch.cat([wide, narrow(inner).mul_(2)], 1)).sum() * out.flatten()

    x = torch.randn(5 * 256)
    expected, _ = gradient("keep", layer, x)
    assert torch.equal(gradient(level, layer, x)[0], expected)


def test_compiled_code_keeps_the_first_projection_of_experts_alone():
    """As eager code does, which plans count: the second one's rows are as many as assignments."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    experts, x = model.model.layers[0].mlp.experts, torch.randn(6, 64, requires_grad=True)
    index, weights = torch.arange(12).view(6, 2) % 4, torch.rand(6, 2)
    kept = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            policy = levels._COMPILED[levels.EXPERTS]()[0].policy_fn
            if policy(None, func, *args) == CheckpointPolicy.MUST_SAVE:
                kept.append((str(func), args[0].shape))
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch, Notes():
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        experts(x, index, weights)
    assert kept == [("moe_qlora.experts_projection.default", (12, 64))]


def test_what_experts_kept_is_not_taken_once_it_was_changed_in_place():
    again = []

    def layer(x):
        saved = pop_saved()
        again.append(saved is not None)
        if saved is None:
            save(saved := [x.detach() * 3])
        return saved[0].mul_(2) * x

    x = torch.randn(120)
    expected, _ = gradient("keep", layer, x)
    assert torch.equal(gradient("experts", layer, x)[0], expected)
    assert again == [False, False, False]


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


def suspended(function, *args, **how):
    """torch's checkpoint before 2.13, which a failed function leaves between these two steps."""

    def hooks():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x + 1, lambda x: x):
            yield

    generator = hooks()
    next(generator)
    result = function(*args)
    next(generator, None)
    return result


@pytest.mark.parametrize("function", [checkpoint, suspended])
def test_a_layer_that_fails_leaves_no_hooks_of_its_checkpoint(function, monkeypatch):
    """While the error is handled, as where a smaller batch is tried, other layers train."""
    monkeypatch.setattr(levels, "checkpoint", function)

    def fails(x):
        raise ValueError(x.exp().shape)

    x = torch.randn(120, requires_grad=True)
    with pytest.raises(ValueError, match="120") as held:
        compute("recompute", fails, (x,), {})
    x.square().sum().backward()
    assert torch.equal(x.grad, 2 * x), held


def test_code_for_one_dtype_is_not_run_on_weights_that_were_cast_in_place(monkeypatch):
    # torch 2.11 on Python 3.12 ran it: its guards did not look at parameters seen a call before.
    alike = []

    def backend(graph, examples):
        compiled_for = dtypes(examples)
        assert not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags

        def run(*args):
            alike.append(dtypes(args) == compiled_for)
            return graph(*args)

        return run

    def dtypes(values):
        return [value.dtype for value in values if isinstance(value, torch.Tensor)]

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
    assert len(alike) == 8
    assert all(alike)
