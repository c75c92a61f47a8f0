"""Counts of assignments: with adapters, under recomputation, of ids of no expert."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from small_models import IDS
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import DetectionError
from moe_qlora.report.counts import ExpertCounts
from moe_qlora.testing import tiny_model
from moe_qlora.train.graphs import check_hooks

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def test_recomputation_and_adapters_count_each_token_once():
    model = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2)
    moe_qlora.quantize_experts(model, NF4)
    peft_model = moe_qlora.get_peft_model(model, LoraConfig(r=2), experts=True).train()
    peft_model.enable_input_require_grads()
    peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    with ExpertCounts(peft_model) as counts:
        for _ in range(2):
            peft_model(input_ids=IDS).logits.sum().backward()
        found = counts.read()
        check_hooks(model.model.layers[0])  # CUDA graphs may record it
    assert list(found) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert all(int(count.sum()) == 2 * 2 * IDS.numel() for count in found.values())
    peft_model(input_ids=IDS)
    assert all(map(torch.equal, counts.read().values(), found.values()))


def test_ids_of_no_expert_are_left_out():
    model = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2)
    experts = model.model.layers[0].mlp.experts
    ids = torch.tensor([[0, 3], [3, 4], [-1, 1]])
    with ExpertCounts(model) as counts:
        (hook,) = experts._forward_pre_hooks.values()
        hook(experts, (torch.randn(3, 64), ids, torch.rand(3, 2)), {})
    assert counts.read()["model.layers.0.mlp.experts"].tolist() == [1, 1, 0, 2]


def test_a_model_without_experts_is_refused():
    with pytest.raises(DetectionError, match="Linear has no fused experts behind a router"):
        ExpertCounts(nn.Linear(2, 2))
