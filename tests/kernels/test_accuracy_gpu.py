"""On a CUDA device: gradients are as near to fp64 as those of PEFT on decoded bf16 experts."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn.functional import silu

from moe_qlora.testing import tiny_config

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 512, "moe_intermediate_size": 192, "num_experts": 16,
         "num_experts_per_tok": 4}  # fmt: skip


def experts_module():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = copy.deepcopy(tiny_config("qwen3_moe"))
    for name, value in SIZES.items():
        setattr(config, name, value)
    config._experts_implementation = "grouped_mm"
    holder = nn.Module()
    holder.experts = Qwen3MoeExperts(config).to("cuda", torch.bfloat16)
    holder.config = config
    with torch.no_grad():
        for parameter in holder.parameters():
            parameter.normal_(std=0.05)
    return holder.requires_grad_(False)


def exact(experts, factors, x, index, weights, grad):
    """Plain loops in fp64 over the decoded weights."""
    count = experts.num_experts
    x, weights, *factors = (t.detach().double().requires_grad_() for t in (x, weights, *factors))
    a1, b1, a2, b2 = factors
    rank = len(a1) // count
    stacks = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    out = torch.zeros_like(x)

    def project(v, stack, a, b, e):
        delta = b.view(len(b), rank, count)[:, :, e] @ a.view(count, rank, -1)[e]
        return v @ (stack[e] + 2.0 * delta).t()

    for e in range(count):
        token, slot = torch.where(index == e)
        gate, up = project(x[token], stacks[0], a1, b1, e).chunk(2, -1)
        y = project(silu(gate) * up, stacks[1], a2, b2, e)
        out = out.index_add(0, token, y * weights[token, slot, None])
    return [out.detach(), *torch.autograd.grad(out, [x, weights, *factors], grad.double())]


@pytest.mark.parametrize("tokens", [16, 100, 400, 3000])
def test_errors_are_at_most_those_of_stock_peft_in_bf16(tokens):
    """Root mean square over five draws; the routing weights of few tokens are few numbers."""
    totals: dict[str, torch.Tensor] = {}
    for seed in range(5):
        torch.manual_seed(seed)
        ours, theirs = experts_module(), experts_module()
        torch.manual_seed(100 + seed)
        count, hidden, inner, rank = 16, 512, 192, 16
        shapes = [(count * rank, hidden), (2 * inner, rank * count), (count * rank, inner),
                  (hidden, rank * count)]  # fmt: skip
        factors = [torch.randn(s, device="cuda").mul(0.05).bfloat16() for s in shapes]
        x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
        index = torch.rand(tokens, count, device="cuda").topk(4, -1).indices
        weights = torch.rand(tokens, 4, device="cuda").softmax(-1).bfloat16().requires_grad_()
        grad = torch.randn(tokens, hidden, device="cuda").bfloat16()

        pack(ours)
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                getattr(theirs.experts, name).copy_(getattr(ours.experts, name))
        right = exact(ours.experts, factors, x, index, weights, grad)
        mine = connect(ours, factors)
        stock = inject(theirs, factors)
        for who, holder, leaves in (("ours", ours, mine), ("stock", theirs, stock)):
            out = holder.experts(x, index, weights)
            got = [out.detach(), *torch.autograd.grad(out, [x, weights, *leaves], grad)]
            errors = torch.stack([
                ((g.double() - r).norm() / r.norm()) ** 2 for g, r in zip(got, right, strict=True)
            ])  # fmt: skip
            totals[who] = totals.get(who, 0) + errors
    assert (totals["ours"] <= 1.1**2 * totals["stock"]).all(), (
        totals["ours"] / totals["stock"]
    ) ** 0.5


def pack(holder):
    from moe_qlora.experts import forward
    from moe_qlora.packing import codec, parametrize
    from moe_qlora.packing.settings import CodecSettings

    for name in ("gate_up_proj", "down_proj"):
        stack = codec.pack(
            getattr(holder.experts, name).data, CodecSettings("nf4", True, torch.uint8)
        )
        parametrize.attach(holder.experts, name, stack)
    forward.activate(holder, ["experts"])


def connect(holder, factors):
    from moe_qlora.experts import operands

    leaves = [f.clone().requires_grad_() for f in factors]
    terms = {
        "gate_up_proj": (operands.LoraFactors(leaves[0], leaves[1], 2.0),),
        "down_proj": (operands.LoraFactors(leaves[2], leaves[3], 2.0),),
    }

    class Provider:
        def active_lora(self, name):
            return terms[name]

    operands.set_lora_source(holder.experts, Provider())
    return leaves


def inject(holder, factors):
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=[], target_parameters=names)
    inject_adapter_in_model(config, holder)
    holder.bfloat16()
    leaves = []
    named = [(n, p) for n, p in holder.named_parameters() if p.requires_grad]
    for factor in factors:
        (leaf,) = [p for _, p in named if p.shape == factor.shape]
        with torch.no_grad():
            leaf.copy_(factor)
        leaves.append(leaf)
    return leaves
