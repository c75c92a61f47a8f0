"""LoRA layers with the same input: PEFT's results and gradients, of fewer products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from emulated_graphs import emulate
from graphed import recorded
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning import levels
from moe_qlora.testing import tiny_model
from moe_qlora.train import joined_lora
from moe_qlora.train.joined_lora import join_lora
from tests.helpers.fitting import on_level

SIZE = 16
NAMES = ("q", "k", "v", "o")


class Model(nn.Module):
    """Attention without scores: o is given another tensor of the same shape than q, k and v."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, SIZE)
        self.blocks = nn.ModuleList(Block({name: make() for name in NAMES}) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


def linear() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def linear_4bit() -> nn.Module:
    return bnb.nn.Linear4bit(SIZE, SIZE, compute_dtype=torch.float32)


def adapted(make: Callable[[], nn.Module] = linear, **lora: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Model(make)
    if make is linear_4bit:
        model.is_loaded_in_4bit = True
        model = model.to("cpu")
    config = LoraConfig(**({"r": 3, "lora_alpha": 5, "target_modules": list(NAMES)} | lora))
    return with_effect(get_peft_model(model, config).train())


def with_effect(model: Any) -> Any:
    """The model with all adapters' B drawn: zero ones would hide A's gradients."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def results(model: Any, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs of one batch, and each trained weight's gradient."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(torch.arange(24).view(2, 12))
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    if out.requires_grad:
        (out.double() * weights).sum().backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.detach(), named


def distance(got: Any, wanted: Any) -> float:
    """The mean distance of outputs and gradients, relative to the wanted tensors' norms."""
    assert got[1].keys() == wanted[1].keys()
    pairs = [(got[0], wanted[0]), *((got[1][name], wanted[1][name]) for name in wanted[1])]
    each = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    return sum(each) / len(each)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of the A of each product that is computed here."""
    rows: list[int] = []

    def counting(x: Tensor, a: Tensor) -> Tensor:
        rows.append(len(a))
        return nn.functional.linear(x, a)

    monkeypatch.setattr(joined_lora, "linear", counting)
    return rows


def member(model: Any) -> Any:
    return model.get_base_model().blocks[0].q


def test_layers_are_grouped_by_the_input_that_they_are_given(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, alone, own = adapted(), [], joined_lora.Linear.forward
    count = lambda *args: (alone.append(1), own(*args))[1]  # noqa: E731
    monkeypatch.setattr(joined_lora.Linear, "forward", count)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys, random = list(model.state_dict()), torch.get_rng_state()
    with join_lora(model) as joined:
        assert (joined.layers, joined.products) == (12, 4)
        assert not join_lora(model).layers  # what is joined stays
        products.clear(), alone.clear()
        results(model)
        assert products == [9] * 4
        assert vars(member(model))["_moe_qlora_joined"].shared.held is None
        assert len(alone) == 4  # of each block, o
        assert list(model.state_dict()) == keys and torch.equal(torch.get_rng_state(), random)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("adapters", "base", "autocast"),
    [(FP32, BF16, True), (FP32, BF16, False), (BF16, FP32, False), (BF16, BF16, True)],
)
def test_as_near_to_exact_results_as_peft(
    base: torch.dtype, adapters: torch.dtype, autocast: bool, products: list[int]
) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(adapters if "lora_" in name else base)
    wanted = results(copy.deepcopy(model).double())
    theirs = results(model, autocast)
    with join_lora(model):
        ours = results(model, autocast)
    assert products == [9] * 4
    assert {n: g.dtype for n, g in ours[1].items()} == {n: g.dtype for n, g in theirs[1].items()}
    assert ours[0].dtype == theirs[0].dtype
    assert distance(ours, wanted) <= 1.5 * distance(theirs, wanted) + 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_of_4_bit(autocast: bool, products: list[int]) -> None:
    model = adapted(linear_4bit)
    assert type(member(model)) is joined_lora.Linear4bit
    wanted = results(model, autocast)
    with join_lora(model):
        assert distance(results(model, autocast), wanted) < (2e-2 if autocast else 1e-5)
    assert products == [9] * 4


@pytest.mark.filterwarnings("ignore:Already unmerged")  # of layers without this adapter
def test_adapters_that_come_and_go(products: list[int]) -> None:
    joined = adapted()
    both = joined, copy.deepcopy(joined)
    join_lora(joined)

    def check(rows: list[int], change: Callable[[Any], Any]) -> None:
        for each in both:
            torch.manual_seed(2)
            change(each)
        products.clear()
        assert distance(*map(results, both)) < 1e-5
        assert products == rows * 4

    config = LoraConfig(
        r=2, lora_alpha=7, target_modules=["q", "v"], use_rslora=True, rank_pattern={"v": 4}
    )
    check([9], lambda model: None)
    check([9], lambda model: (model.add_adapter("other", config), with_effect(model)))
    check([2 + 3 + 3 + 4 + 3], lambda model: model.base_model.set_adapter(["other", "default"]))
    check([6], lambda model: model.set_adapter("other"))
    check([6], lambda model: model.delete_adapter("default"))
    products.clear()
    with both[0].disable_adapter(), both[1].disable_adapter():
        assert torch.equal(*(results(model)[0] for model in both))
    assert not products
    check([6], lambda model: None)
    check([], lambda model: model.merge_adapter())
    check([6], lambda model: model.unmerge_adapter())


def hooked(model: Any) -> None:
    member(model).lora_A["default"].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("lora", "change"),
    [
        ({"lora_dropout": 0.5}, None),
        ({"use_dora": True}, None),
        ({"lora_bias": True}, None),
        ({}, nn.Module.eval),
        ({}, hooked),
    ],
)
def test_what_is_not_known_runs_as_it_did(lora: Any, change: Any, products: list[int]) -> None:
    model = adapted(**lora)
    if change is not None:
        change(model)
    torch.manual_seed(2)
    wanted = results(model)
    products.clear()
    join_lora(model)
    torch.manual_seed(2)
    got = results(model)
    # A block whose q is changed, or all of them
    assert products == ([9] * 3 if change is hooked else [])
    assert distance(got, wanted) < 1e-6


@pytest.fixture
def model() -> Any:
    made: Any = tiny_model("qwen3_moe", hidden_size=256)  # whose products are kept
    made.config.use_cache = False
    moe_qlora.quantize_experts(made, BitsAndBytesConfig(load_in_4bit=True))
    config = LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return with_effect(moe_qlora.get_peft_model(made, config, experts=True).train())


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), named


@pytest.mark.parametrize("level", [levels.KEEP, levels.RECOMPUTE])
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_layers_that_are_computed_again_or_recorded(
    model: Any, level: str, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = step(model)
    with join_lora(model) as joined:
        assert (joined.layers, joined.products) == (6, 2)
        runners = [on_level(each, level) for each in model.get_base_model().model.layers]
        products.clear()
        assert distance(step(model), wanted) < 1e-4
        assert products == [9] * (2 if level == levels.KEEP else 4)
        for runner in runners:
            runner.level = None
            runner.end()
        emulate(monkeypatch)
        with recorded(model.get_base_model(), level) as graphs:
            for _ in range(4):
                assert distance(step(model), wanted) < 1e-4
            assert graphs.recorded == 2 and set(products) == {9}
