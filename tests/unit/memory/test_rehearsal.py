"""Bytes by kind and the moments of a step, against the models and plans that they are of."""

from __future__ import annotations

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.report.write import KINDS, take_inventory
from moe_qlora.testing import tiny_config, tiny_model

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
INT8 = BitsAndBytesConfig(load_in_8bit=True)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dbrx", "deepseek_v3"])
@pytest.mark.parametrize("packing", [NF4, INT8], ids=["nf4", "int8"])
def test_bytes_by_kind_add_up_to_the_plan(model_type, packing):
    config = tiny_config(model_type)
    inventory = take_inventory(config, packing)
    plan = moe_qlora.plan(config, packing, search=False, seq=64)
    assert sum(kind.before for kind in inventory.kinds) == plan.unpacked
    assert sum(kind.after for kind in inventory.kinds) == plan.resident
    assert [kind.kind for kind in inventory.kinds] == [
        kind for kind in KINDS if kind in {one.kind for one in inventory.kinds}
    ]
    experts = inventory.kinds[0]
    assert experts.kind == "experts"
    layout = moe_qlora.detect(tiny_model(model_type, dtype=config.dtype))
    assert experts.weights == sum(param.numel for param in layout.experts)


def test_kinds_of_a_plain_model_by_hand():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    kinds = {kind.kind: kind for kind in take_inventory(model.config, NF4).kinds}
    tables = model.get_input_embeddings().weight.numel()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        tables += model.get_output_embeddings().weight.numel()
    assert kinds["embeddings and head"].weights == tables
    routers = [m.mlp.gate.weight.numel() for m in model.model.layers]
    assert kinds["routers"].weights == sum(routers)
    linears = [
        m.weight.numel()
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "self_attn" in name
    ]
    assert kinds["Linear layers"].weights == sum(linears)
    assert kinds["Linear layers"].after < kinds["Linear layers"].before
    assert kinds["routers"].after == kinds["routers"].before


def test_a_packed_model_counts_as_its_configuration_does():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, NF4)
    packed = {kind.kind: kind for kind in take_inventory(model).kinds}["experts"]
    plain = {kind.kind: kind for kind in take_inventory(model.config, NF4).kinds}["experts"]
    assert (packed.weights, packed.after) == (plain.weights, plain.after)
    assert packed.before == plain.before  # what was packed, though it is gone
