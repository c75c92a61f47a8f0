"""`torch.topk` within compiled decoder layers: by our kernel, with torch's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphed import COMPILED, assert_near, batch, gradients, packed
from peft import LoraConfig
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from transformers import BitsAndBytesConfig

pytest.importorskip("triton")
import moe_qlora
from moe_qlora.memory import levels
from moe_qlora.speed import fitted, top_k
from moe_qlora.speed.fitted import FittedLayer
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices

OPTION = "post_grad_custom_pre_pass"
Pair = tuple[Tensor, Tensor]
Calls = list[tuple[int, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The shapes that the kernel is called with, and k."""
    shapes: Calls = []
    kernel = top_k.kernel.top_k

    def counting(x: Tensor, k: int) -> Pair:
        shapes.append((*x.shape, k))
        return kernel(x, k)

    monkeypatch.setattr(top_k.kernel, "top_k", counting)
    torch._dynamo.reset()
    return shapes


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Calls on the CPU are replaced too, and not found again in Inductor's cache."""
    monkeypatch.setattr(top_k, "_is_on_device", lambda x: True)
    monkeypatch.setattr(top_k.TopKPass, "uuid", lambda self: None)


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, options=top_k.compile_options(), **how)


def check(function: Callable[[Tensor], list[Pair]], x: Tensor) -> None:
    """Compiled results are torch's, unsorted ones in another order, and so are gradients."""
    x.requires_grad_()
    pairs = compiled(function)(x)
    for (values, index), wanted in zip(pairs, function(x), strict=True):
        in_order = [found.sort(descending=True)[0] for found in (values, wanted[0])]
        torch.testing.assert_close(*in_order, rtol=0, atol=0, equal_nan=True)
        assert all(len({*row}) == len(row) for row in index.view(-1, index.shape[-1]).tolist())
    # Of equal numbers torch may take others
    gathered = [x.gather(-1, index) for _, index in pairs]
    for (values, _), at_index in zip(pairs, gathered, strict=True):
        torch.testing.assert_close(values, at_index, rtol=0, atol=0, equal_nan=True)
    grads = [
        torch.autograd.grad(sum((each.float() ** 3).sum() for each in found), x)[0]
        for found in ([values for values, _ in pairs], gathered)
    ]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-6, equal_nan=True)


def every_way(x: Tensor) -> list[Any]:
    first = torch.topk(x, 2, dim=-1, sorted=False)
    return [first, x.topk(3), torch.topk(x, k=1), torch.topk(x, 16, x.ndim - 1)]


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (16,)])
def test_results_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, calls: Calls
) -> None:
    torch.manual_seed(0)
    check(every_way, torch.randn(shape).to(dtype))
    assert calls == [(*shape, k) for k in (2, 3, 1, 16)]


@pytest.mark.usefixtures("forced")
def test_equal_numbers_and_those_that_are_none(calls: Calls) -> None:
    x = torch.tensor([0.0, float("nan"), 1.0, float("inf"), 1.0, 1.0, float("-inf"), 0.0])
    check(lambda x: [torch.topk(x, k) for k in (1, 4, 8)], torch.stack([x, x.flip(0), x * 0]))
    assert len(calls) == 3


@pytest.mark.usefixtures("forced")
def test_rows_of_any_number(calls: Calls) -> None:
    """Strides too; a size of the rows themselves must be known."""

    def function(x: Tensor) -> list[Any]:
        return [torch.topk(x, 2), torch.topk(x.t().contiguous().t() + 1, 3)]

    counters.clear()
    run = compiled(function, dynamic=True)
    for rows, width in ((5, 16), (7, 16), (7, 12)):
        x = torch.randn(rows, width)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_static(x, 1)
        for found, wanted in zip(run(x), function(x), strict=True):
            assert all(map(torch.equal, found, wanted))
    assert calls == [(5, 16, 2), (5, 16, 3), (7, 16, 2), (7, 16, 3), (7, 12, 2), (7, 12, 3)]
    assert counters["stats"]["unique_graphs"] == 2
    calls.clear()
    torch._dynamo.reset()
    for k in (2, 3):
        compiled(lambda x, k: torch.topk(x, k), dynamic=True)(torch.randn(5, 16), k)
    assert not calls


def others(x: Tensor) -> list[Any]:
    wide = x.repeat(1, 100)
    return [
        torch.topk(x, 2, dim=0),
        torch.topk(x, 2, largest=False),
        torch.topk(x.double(), 2),
        torch.topk(wide, 2),
        torch.topk(wide[:, :32], 20),
        torch.topk(x.sum(), 1, 0),
    ]


@pytest.mark.usefixtures("forced")
def test_what_the_kernel_does_not_compute_is_left_to_torch(calls: Calls) -> None:
    x = torch.randn(5, 16)
    for found, wanted in zip(compiled(others)(x), others(x), strict=True):
        torch.testing.assert_close(found[0], wanted[0])
    assert not calls


def test_on_the_cpu_and_in_code_compiled_elsewhere_it_is_torch(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 16)
    compiled(every_way)(x)
    monkeypatch.setattr(top_k, "_is_on_device", lambda x: True)
    torch.compile(lambda x: torch.topk(x, 5))(x)
    assert not calls


class Sees(CustomGraphPass):
    """A pass of a user, and the operators that it has seen."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen |= {node.target for node in graph.nodes}

    def uuid(self) -> str:
        return "sees"


@pytest.mark.usefixtures("forced")
def test_another_pass_still_runs_and_before_ours(calls: Calls) -> None:
    sees = Sees()
    with config.patch({OPTION: sees}):
        run = compiled(lambda x: torch.topk(x, 2))
        assert top_k.compile_options() == top_k.compile_options()
    run(torch.randn(5, 16))
    assert calls == [(5, 16, 2)] and torch.ops.aten.topk.default in sees.seen
    assert torch.ops.moe_qlora.top_k.default not in sees.seen


def test_passes_are_told_apart() -> None:
    own, both = top_k.TopKPass(), top_k.TopKPass(Sees())
    assert own.uuid() and both.uuid() and own.uuid() != both.uuid()
    assert top_k.TopKPass(lambda graph: None).uuid() is None
    assert own == top_k.TopKPass() != both


def test_where_no_options_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*top_k.compile_options()] == [OPTION]
    monkeypatch.setattr(torch.compiler, "get_default_backend", lambda: "eager", raising=False)
    assert top_k.compile_options() == {}
    monkeypatch.undo()
    monkeypatch.setattr(top_k, "HAS_TRITON", False)
    assert top_k.compile_options() == {}


@pytest.mark.usefixtures("interpreted")
def test_code_from_inductors_cache_calls_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "_is_on_device", lambda x: True)
    with fresh_cache():
        for time in range(2):
            counters.clear()
            torch._dynamo.reset()
            compiled(lambda x: torch.topk(x, 2))(torch.randn(5, 16))
            assert len(calls) == time + 1
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


def packed_on_the_cpu(model_type: str) -> Any:
    model: Any = tiny_model(model_type)
    model.config.use_cache = False
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    lora = LoraConfig(r=3, target_modules=["o_proj"])
    return moe_qlora.get_peft_model(model, lora, experts=True).train()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("model_type", "level", "shapes"),
    [
        ("qwen3_moe", levels.ATTENTION, [(24, 4, 2)] * 2),  # which keeps the router's choice
        ("deepseek_v3", levels.KEEP, [(24, 1, 4, 2), (24, 1, 1), (24, 4, 2)]),  # One layer is dense
    ],
)
def test_a_compiled_model_trains_alike(
    model_type: str, level: str, shapes: Calls, calls: Calls, request: pytest.FixtureRequest
) -> None:
    model = packed_on_the_cpu(model_type)
    ids = torch.arange(24).view(2, 12)

    def step() -> list[Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for layer in model.get_base_model().model.layers:
        layer.compile()
        FittedLayer(layer, level, (2, 12), set())
    wanted = step()
    assert not calls
    request.getfixturevalue("forced")
    counters.clear()
    got = step()
    assert calls == shapes and not counters["graph_break"]
    assert len(got) == len(wanted) > 3
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_recorded_layers_call_it(
    model_type: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(model_type)

    def steps() -> list[Any]:
        torch._dynamo.reset()
        with moe_qlora.graph_layers(model, compiled=True) as graphs:
            found = [gradients(model, batch(step)) for step in range(4)]
            assert graphs.recorded == model.config.num_hidden_layers
        return found

    with monkeypatch.context() as without:
        without.setattr(fitted, "compile_options", dict)
        wanted = steps()
    assert not calls
    for got, each in zip(steps(), wanted, strict=True):
        assert_near(got, each, COMPILED)
    assert calls
