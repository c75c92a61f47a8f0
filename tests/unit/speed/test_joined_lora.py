"""LoRA layers with the same input: PEFT's results and gradients, of fewer products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from emulated_graphs import emulate, emulated
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.lora.layer import use_own_layers
from moe_qlora.memory import levels
from moe_qlora.speed import joined_lora
from moe_qlora.speed.fitted import FittedLayer
from moe_qlora.speed.joined_lora import join_lora
from moe_qlora.testing import tiny_model

SIZE = 16
NAMES = ("q", "k", "v", "o")


class Block(nn.Module):
    """Attention without scores: o is given another tensor of the same shape than q, k and v."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (make() for _ in NAMES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], checkpoints: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, SIZE)
        self.blocks = nn.ModuleList(Block(make) for _ in range(4))
        self.checkpoints = checkpoints  # None: no; else whether by reentrant ones

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            if self.checkpoints is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoints)
        return x


def linear() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def linear_4bit() -> nn.Module:
    return bnb.nn.Linear4bit(SIZE, SIZE, compute_dtype=torch.float32)


def linear_8bit() -> nn.Module:
    return bnb.nn.Linear8bitLt(SIZE, SIZE, has_fp16_weights=False)


def adapted(
    make: Callable[[], nn.Module] = linear, checkpoints: bool | None = None, **lora: Any
) -> Any:
    torch.manual_seed(0)
    model: Any = Model(make, checkpoints)
    if make is not linear:
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = make is linear_4bit, make is linear_8bit
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


def held(model: Any) -> Any:
    return vars(member(model))["_moe_qlora_joined"].shared.held


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
        assert products == [9] * 4 and held(model) is None
        assert len(alone) == 4  # of each block, o
        assert list(model.state_dict()) == keys and torch.equal(torch.get_rng_state(), random)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [linear, linear_4bit])
def test_as_near_to_exact_results_as_peft(
    make: Any, base: torch.dtype, adapters: torch.dtype, autocast: bool, products: list[int]
) -> None:
    if autocast and adapters == torch.float64:
        pytest.skip("autocast leaves float64 alone, and PEFT's own products fail")
    model = adapted(make)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(adapters if "lora_" in name else base)
    exact = copy.deepcopy(model)
    for name, module in exact.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.float64
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            parent = exact.get_submodule(name.rpartition(".")[0])
            parent.base_layer = nn.Linear(SIZE, SIZE)
            parent.base_layer.weight = nn.Parameter(weight, requires_grad=False)
            parent.base_layer.bias = module.bias
    wanted = results(exact.double())
    assert make is linear or type(member(model)) is joined_lora.Linear4bit
    theirs = results(model, autocast)
    with join_lora(model):
        ours = results(model, autocast)
    assert products == [9] * 4
    assert {n: g.dtype for n, g in ours[1].items()} == {n: g.dtype for n, g in theirs[1].items()}
    assert ours[0].dtype == theirs[0].dtype
    assert distance(ours, wanted) <= 1.5 * distance(theirs, wanted) + 1e-6


@pytest.mark.filterwarnings("ignore:Merge lora module")
@pytest.mark.parametrize("make", [linear_4bit, linear_8bit])
def test_layers_that_use_own_layers(make: Any, products: list[int]) -> None:
    """`moe_qlora.get_peft_model` puts classes of its own over bitsandbytes' layers."""
    model = adapted(make)
    wanted = results(model)
    use_own_layers(model)
    plain = copy.deepcopy(model)
    plain.merge_adapter()
    with join_lora(model) as joined:
        assert (joined.layers, joined.products) == (12, 4)
        products.clear()
        assert distance(results(model), wanted) < 1e-5 and products == [9] * 4
        model.merge_adapter()
        assert torch.equal(results(model)[0], results(plain)[0])
        model.unmerge_adapter()
        assert distance(results(model), wanted) < 1e-5


@pytest.mark.filterwarnings("ignore:Already unmerged")  # of layers without this adapter
def test_adapters_that_come_and_go(products: list[int]) -> None:
    model = adapted()
    plain = copy.deepcopy(model)
    join_lora(model)

    def equal(rows: list[int]) -> None:
        products.clear()
        assert distance(results(model), results(plain)) < 1e-5
        assert products == rows * 4

    equal([9])
    for each in (model, plain):
        config = LoraConfig(
            r=2, lora_alpha=7, target_modules=["q", "v"], use_rslora=True, rank_pattern={"v": 4}
        )
        torch.manual_seed(2)
        each.add_adapter("other", config)
        with_effect(each)
    equal([9])
    for each in (model, plain):
        each.base_model.set_adapter(["other", "default"])
    equal([2 + 3 + 3 + 4 + 3])
    for each in (model, plain):
        each.set_adapter("other")
    equal([6])
    for each in (model, plain):
        each.delete_adapter("default")
    equal([6])
    products.clear()
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(results(model)[0], results(plain)[0])
    assert not products
    equal([6])
    for each in (model, plain):
        each.merge_adapter()
    equal([])
    for each in (model, plain):
        each.unmerge_adapter()
    equal([6])


def hooked(model: Any) -> None:
    member(model).lora_A["default"].register_forward_hook(lambda *_: None)


def wrapped(model: Any) -> None:
    first = member(model).lora_A["default"]
    first.forward = first.forward


@pytest.mark.parametrize(
    ("lora", "change"),
    [
        ({"lora_dropout": 0.5}, None),
        ({"use_dora": True}, None),
        ({"lora_bias": True}, None),
        ({}, nn.Module.eval),
        ({}, hooked),
        ({}, wrapped),
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
    assert products == ([9] * 3 if change in (hooked, wrapped) else [])
    assert distance(got, wanted) < 1e-6


@pytest.mark.parametrize("make", [linear, linear_4bit])
@pytest.mark.parametrize(
    "add",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_the_frozen_layers_and_of_their_factors_are_called(make: Any, add: str) -> None:
    model = adapted(make)
    model.get_base_model().embedding.requires_grad_(True)
    wanted, calls = results(model), []
    block = model.get_base_model().blocks[1]
    hooked = [block.k.base_layer, block.o.base_layer, block.q.lora_dropout["default"]]
    hooked += [block.k.lora_A["default"], block.v.lora_B["default"]]
    for module in hooked:
        getattr(module, add)(lambda *_: calls.append(1) or None)
    with join_lora(model):
        calls.clear()
        assert distance(results(model), wanted) < 1e-5
    assert len(calls) == len(hooked)


def doubles(module: Any, args: Any, *_: Any) -> None:
    args[0].mul_(2)


BEFORE, AFTER = "register_forward_pre_hook", "register_forward_hook"
PLACES = ("k", "k.base_layer", "k.lora_A.default", "k.lora_B.default", "v")


@pytest.mark.parametrize(
    ("where", "add", "compiles"),
    [
        *((where, add, False) for where in PLACES for add in (BEFORE, AFTER)),
        *((where, (BEFORE, AFTER)[i % 2], True) for i, where in enumerate(PLACES)),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
def test_hooks_that_change_their_input_in_place(where: str, add: str, compiles: bool) -> None:
    """In fp32, PEFT gives A a copy of a bfloat16 x, so that autograd needs no unchanged x."""
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    block = model.get_base_model().blocks[1]
    getattr(block.get_submodule(where), add)(doubles)
    if compiles:
        torch._dynamo.reset()
    with torch.no_grad():
        wanted = results(model)
        with join_lora(model):
            if compiles:
                block.compile(backend="eager")
            got = results(model)
    assert distance(got, wanted) < 1e-2


def test_outputs_and_inputs_may_be_changed_in_place_by_their_parent(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama4 and OLMoE with `clip_qkv` change outputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        k, q = self.k(x).mul_(2), self.q(x).clamp_(-0.5)
        other = x.detach().clone()
        v = self.v(other).detach()
        return q * k + v + self.o(other.mul_(2))

    monkeypatch.setattr(Block, "forward", forward)
    model = adapted()
    wanted = results(model)
    with join_lora(model) as joined:
        assert (joined.layers, joined.products) == (8, 4)
        products.clear()
        assert distance(results(model), wanted) < 1e-5 and products == [6] * 4


def test_a_layer_is_joined_with_those_of_its_call_alone(products: list[int]) -> None:
    model = adapted()
    plain = copy.deepcopy(model)
    joined = join_lora(model)
    ours, theirs = model.get_base_model().blocks[0], plain.get_base_model().blocks[0]
    x, other = torch.randn(3, SIZE), torch.randn(3, SIZE)

    def equal(name: str, x: Tensor, **kwargs: Any) -> None:
        got = getattr(ours, name)(x, **kwargs)
        torch.testing.assert_close(got, getattr(theirs, name)(x, **kwargs))
        assert got.requires_grad is torch.is_grad_enabled()

    equal("k", x)  # without the first of them
    equal("q", x)
    equal("k", x.clone())
    equal("q", x)
    equal("q", other)
    equal("k", x)
    equal("v", other)
    assert held(model) is None and products == [9] * 3
    equal("q", x)
    x.mul_(2)  # A parent may change it after some of its calls
    equal("k", x)
    with torch.no_grad():
        equal("q", x)
    equal("k", x)  # with a gradient
    equal("v", x, adapter_names=["default", "__base__", "default"])
    assert held(model) is None
    for name in NAMES:
        equal(name, x[None], adapter_names=["default"])
    joined.remove()
    assert "forward" not in vars(ours.q)


def test_nothing_is_left_of_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    wanted = results(model)
    join_lora(model)
    failing = model.get_base_model().blocks[2].k
    with monkeypatch.context() as patch:
        patch.setattr(failing, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            results(model)
    x = held(model)[1]
    model.get_base_model().blocks[0].q(torch.zeros(1, SIZE))  # of the next forward
    assert held(model)[1] is not x
    assert distance(results(model), wanted) < 1e-5 and held(model) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again(reentrant: bool, products: list[int]) -> None:
    model = adapted(checkpoints=reentrant)
    model.get_base_model().embedding.requires_grad_(True)
    wanted = results(model)
    join_lora(model)
    products.clear()
    assert distance(results(model), wanted) < 1e-5
    assert products == [9] * 8 and held(model) is None


def test_a_copy_is_joined_by_itself(products: list[int]) -> None:
    model = adapted()
    joined = join_lora(model)
    copied = copy.deepcopy(model)
    first = vars(member(copied))["_moe_qlora_joined"]
    assert first.layers[0] is member(copied) and first.shared.held is None
    joined.remove()
    products.clear()
    wanted = results(model)
    assert not products
    assert distance(results(copied), wanted) < 1e-5 and products == [9] * 4


def test_a_model_that_fails_is_as_it_was() -> None:
    model = adapted()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model.get_base_model().forward = lambda input_ids: 1 / 0
    with pytest.raises(ZeroDivisionError):
        join_lora(model)
    del model.get_base_model().forward
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
def test_compiled_layers_share_code_of_fewer_products() -> None:
    model = adapted(linear_4bit)
    model.get_base_model().embedding.requires_grad_(True)  # all inputs have gradients
    wanted = results(model)
    counts: list[int] = []  # products

    def count(graph: Any, inputs: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        counts.append(sum(targets.count(f"aten.{name}.default") for name in ("mm", "addmm")))
        return graph

    def compiled() -> tuple[int, list[int]]:
        torch._dynamo.reset()
        counts.clear()
        backend = CompileCounterWithBackend(aot_autograd(fw_compiler=count, bw_compiler=count))
        for block in model.get_base_model().blocks:
            block.compile(backend=backend, fullgraph=True)
        for _ in range(2):
            assert distance(results(model), wanted) < 1e-5
        for block in model.get_base_model().blocks:
            block._compiled_call_impl = None
        return backend.frame_count, list(counts)

    frames, before = compiled()
    assert frames == 1
    with join_lora(model):
        frames, after = compiled()
        assert frames == 1 and held(model) is None
    # Of q, k and v: 3 A x, and in backward 3 dA and 3 dx, are one each.
    assert [a - b for a, b in zip(before, after, strict=True)] == [2, 4]


def packed(**sizes: Any) -> tuple[Any, Callable[[], tuple[Tensor, dict[str, Tensor]]]]:
    """A packed model, and what gives the loss and the gradients of one batch."""
    model: Any = tiny_model("qwen3_moe", **sizes)
    model.config.use_cache = False
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    moe_qlora.quantize_experts(model, quantization)
    config = LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = with_effect(moe_qlora.get_peft_model(model, config, experts=True).train())

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        ids = torch.arange(24).view(2, 12)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), named

    return model, step


@pytest.mark.parametrize("level", levels.EVERY)
def test_layers_that_keep_a_part(level: str, products: list[int]) -> None:
    model, step = packed(hidden_size=256)  # whose products are kept
    wanted = step()
    join_lora(model)
    for layer in model.get_base_model().model.layers:
        FittedLayer(layer, level, (1, 10_000), set())
    products.clear()
    assert distance(step(), wanted) < 1e-4
    assert products == [9] * (2 if level == levels.KEEP else 4)
    first = vars(model.get_base_model().model.layers[0].self_attn.q_proj)["_moe_qlora_joined"]
    assert first.shared.held is None


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("keep", [False, True])
def test_joined_layers_are_recorded(
    monkeypatch: pytest.MonkeyPatch, keep: bool, products: list[int]
) -> None:
    emulate(monkeypatch)
    model, step = packed()
    wanted = step()
    with join_lora(model) as joined:
        assert (joined.layers, joined.products) == (6, 2)
        with emulated(model.get_base_model(), keep=keep) as graphs:
            for _ in range(4):
                assert distance(step(), wanted) < 1e-4
            assert graphs.recorded == 2 and set(products) == {9}
