"""The experts forward where exactness is easily lost: dtypes, several adapters, recomputation."""

from __future__ import annotations

import contextlib
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.integrations.moe import use_experts_implementation

from moe_qlora.experts import forward as experts
from moe_qlora.experts import operands
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing import settings as settings_

E, H, INNER = 5, 24, 12


@use_experts_implementation(has_gate=False)
class Ungated(nn.Module):
    def __init__(self, config: Any, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up_proj = nn.Parameter(torch.randn(count, inner, hidden) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, *_: Tensor) -> Tensor:
        raise AssertionError("the class's own forward must not run")


class Provider:
    def __init__(self, **by_name: list[operands.LoraFactors]) -> None:
        self.by_name = by_name

    def active_lora(self, parameter_name: str) -> tuple[operands.LoraFactors, ...]:
        return tuple(self.by_name.get(parameter_name, ()))

    def leaves(self) -> list[Tensor]:
        return [f for terms in self.by_name.values() for term in terms for f in (term.a, term.b)]


def make(
    count: int = E,
    hidden: int = H,
    inner: int = INNER,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
) -> Any:
    torch.manual_seed(0)
    config = PretrainedConfig()
    config._experts_implementation = "grouped_mm"
    module: Any = Ungated(config, count, hidden, inner).to(dtype)
    holder = nn.Module()
    holder.experts = module
    settings = settings_.CodecSettings("nf4", compute_dtype=compute)
    for name in ("up_proj", "down_proj"):
        parametrize.attach(module, name, codec.pack(getattr(module, name), settings))
    assert experts.activate(holder, ["experts"]) == ()
    return module


def term(
    module: Any,
    name: str,
    rank: int,
    scaling: float,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: nn.Module | None = None,
) -> operands.LoraFactors:
    count, out, inputs = parametrize.read_packed(module, name).shape
    a = torch.randn(count * rank, inputs, dtype=dtype) * 0.3
    b = torch.randn(out, rank * count, dtype=dtype) * 0.3
    return operands.LoraFactors(a.requires_grad_(), b.requires_grad_(), scaling, dropout)


def adapted(module: Any, **kwargs: Any) -> Provider:
    names = ("up_proj", "down_proj")
    provider = Provider(**{name: [term(module, name, 3, 0.7, **kwargs)] for name in names})
    operands.set_lora_source(module, provider)
    return provider


def routing(tokens: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, H, dtype=dtype).requires_grad_()
    index = torch.stack([torch.randperm(E)[:2] for _ in range(tokens)])
    return x, index, torch.rand(tokens, 2, dtype=dtype).requires_grad_()


def slow(module: Any, provider: Provider, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token and one choice at a time, in fp64."""
    full = {}
    for name in ("up_proj", "down_proj"):
        stack = codec.unpack(parametrize.read_packed(module, name)).double()
        for one in provider.active_lora(name):
            a = one.a.double().reshape(len(stack), -1, stack.shape[2])
            b = one.b.double().reshape(stack.shape[1], -1, len(stack))
            deltas = [b[:, :, expert] @ a[expert] for expert in range(len(stack))]
            stack = stack + one.scaling * torch.stack(deltas)
        full[name] = stack
    rows = []
    for token, chosen in enumerate(index.tolist()):
        row = torch.zeros(x.shape[1], dtype=torch.float64)
        for slot, expert in enumerate(chosen):
            inner = F.silu(full["up_proj"][expert] @ x[token].double())
            row = row + weights[token, slot].double() * (full["down_proj"][expert] @ inner)
        rows.append(row)
    return torch.stack(rows)


def off(mine: Tensor, theirs: Tensor) -> float:
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).norm() / theirs.norm())


def test_gradcheck_in_fp64() -> None:
    module = make()
    provider = adapted(module, dtype=torch.float64)
    x, index, weights = routing(4, torch.float64)
    leaves = (x, weights, *provider.leaves())
    assert torch.autograd.gradcheck(lambda *_: module(x, index, weights), leaves, fast_mode=True)


def test_a_factor_that_is_frozen_gets_no_gradient() -> None:
    module = make()
    provider = adapted(module)
    frozen, trained = provider.by_name["up_proj"][0].a, provider.by_name["up_proj"][0].b
    frozen.requires_grad_(False)
    x, index, weights = routing()
    module(x.detach(), index, weights.detach()).sum().backward()
    assert frozen.grad is None
    assert trained.grad is not None


def test_fp32_adapters_over_a_bf16_layer_stay_fp32() -> None:
    module = make(dtype=torch.bfloat16)
    provider = adapted(module)
    x, index, weights = routing(33, torch.bfloat16)
    out = module(x, index, weights)
    assert out.dtype == torch.bfloat16
    assert off(out, slow(module, provider, x, index, weights)) < 0.02
    for leaf, grad in zip(
        provider.leaves(), torch.autograd.grad(out.sum(), provider.leaves()), strict=True
    ):
        assert grad.dtype == leaf.dtype == torch.float32


def test_adapters_read_inputs_that_are_not_rounded_to_the_compute_dtype() -> None:
    """A's rows sum to zero: of inputs near 1, which bf16 rounds to 1, nothing would be left."""
    module = make(compute=torch.bfloat16)
    provider = adapted(module)
    factors = provider.by_name["up_proj"][0]
    factors.a.data -= factors.a.data.mean(1, keepdim=True)
    x, index, weights = routing(33)
    x = (1 + x.detach() / 2**12).requires_grad_()
    exact = slow(module, provider, x, index, weights).sum()
    for mine, wanted in zip(
        torch.autograd.grad(module(x, index, weights).sum(), provider.leaves()),
        torch.autograd.grad(exact, provider.leaves()),
        strict=True,
    ):
        assert off(mine, wanted) < 0.02


def test_one_module_twice_in_a_model() -> None:
    module = make()
    provider = adapted(module)
    x, index, weights = routing()
    mine = module(module(x, index, weights), index, weights)
    inner = slow(module, provider, x, index, weights)
    theirs = slow(module, provider, inner, index, weights)
    assert off(mine, theirs) < 1e-5
    leaves = provider.leaves()
    theirs_grads = torch.autograd.grad(theirs.sum(), leaves)
    for got, want in zip(torch.autograd.grad(mine.sum(), leaves), theirs_grads, strict=True):
        assert off(got, want) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_computes_in_the_dtype_that_linear4bit_computes_in(
    compute: torch.dtype, autocast: bool
) -> None:
    """One expert equals two Linear4bit of the same weights; another dtype is 4e-3 off."""
    module = make(1, 64, 64, compute=compute)
    layers = []
    for name in ("up_proj", "down_proj"):
        weight = codec.unpack(parametrize.read_packed(module, name))[0]
        layer = bitsandbytes.nn.Linear4bit(
            64, 64, bias=False, compute_dtype=compute, compress_statistics=False, quant_type="nf4"
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=False, quant_type="nf4"
        )
        layers.append(layer.to("cpu"))
    x = torch.randn(40, 64).requires_grad_()
    routed = torch.zeros(40, 1, dtype=torch.long), torch.ones(40, 1)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        mine = module(x, *routed)
        theirs = layers[1](F.silu(layers[0](x)))
    assert mine.dtype == theirs.dtype == torch.float32
    assert off(mine, theirs) < 5e-4
