"""Bytes by kind, against the models and plans that they are of."""

from __future__ import annotations

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning.model import source_of
from moe_qlora.report.write import KINDS, bytes_by_kind
from moe_qlora.testing import tiny_config, tiny_model
from tests.helpers.plans import plan

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dbrx", "deepseek_v3"])
@pytest.mark.parametrize("packing", [NF4, BitsAndBytesConfig(load_in_8bit=True)])
def test_bytes_by_kind_add_up_to_the_plan(model_type, packing):
    config = tiny_config(model_type)
    _, kinds = bytes_by_kind(source_of(config, packing))
    made = plan(config, packing, search=False, seq=64)
    _, before, after = map(sum, zip(*kinds.values(), strict=True))
    assert (before, after) == (made.unpacked, made.resident)
    assert [*kinds] == [kind for kind in KINDS if kind in kinds]
    layout = moe_qlora.detect(tiny_model(model_type, dtype=config.dtype))
    assert kinds["experts"][0] == sum(param.numel for param in layout.experts)


def test_a_packed_model_counts_as_its_configuration_does():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    routers = sum(layer.mlp.gate.weight.numel() for layer in model.model.layers)
    moe_qlora.quantize_experts(model, NF4)
    _, packed = bytes_by_kind(source_of(model, None))
    _, plain = bytes_by_kind(source_of(model.config, NF4))
    assert packed["experts"] == plain["experts"]  # with the bytes before, though these are gone
    assert packed["routers"] == [routers, 2 * routers, 2 * routers]
