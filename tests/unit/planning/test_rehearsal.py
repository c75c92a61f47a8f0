"""Bytes by kind and the moments of a step, against the models and plans that they are of."""

from __future__ import annotations

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning.meta_model import source_of
from moe_qlora.report.write import KINDS, bytes_by_kind
from moe_qlora.testing import tiny_config, tiny_model
from tests.helpers.plans import plan

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
INT8 = BitsAndBytesConfig(load_in_8bit=True)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dbrx", "deepseek_v3"])
@pytest.mark.parametrize("packing", [NF4, INT8], ids=["nf4", "int8"])
def test_bytes_by_kind_add_up_to_the_plan(model_type, packing):
    config = tiny_config(model_type)
    _, kinds = bytes_by_kind(source_of(config, packing))
    made = plan(config, packing, search=False, seq=64)
    _, before, after = map(sum, zip(*kinds.values(), strict=True))
    assert (before, after) == (made.unpacked, made.resident)
    assert [*kinds] == [kind for kind in KINDS if kind in kinds]
    layout = moe_qlora.detect(tiny_model(model_type, dtype=config.dtype))
    assert kinds["experts"][0] == sum(param.numel for param in layout.experts)


def test_kinds_of_a_plain_model_by_hand():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    _, kinds = bytes_by_kind(source_of(model.config, NF4))
    tables = model.get_input_embeddings().weight.numel()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        tables += model.get_output_embeddings().weight.numel()
    assert kinds["embeddings and head"][0] == tables
    routers = [m.mlp.gate.weight.numel() for m in model.model.layers]
    assert kinds["routers"][0] == sum(routers)
    linears = [
        m.weight.numel()
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "self_attn" in name
    ]
    weights, before, after = kinds["Linear layers"]
    assert weights == sum(linears) and after < before
    assert kinds["routers"][1] == kinds["routers"][2]


def test_a_packed_model_counts_as_its_configuration_does():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, NF4)
    _, packed = bytes_by_kind(source_of(model, None))
    _, plain = bytes_by_kind(source_of(model.config, NF4))
    assert packed["experts"] == plain["experts"]  # with the bytes before, though these are gone
