"""What `print(model)` shows of packed weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.layout import human_bytes
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model


@pytest.mark.parametrize(
    ("config", "codec"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        (
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            },
            "nf4 with double quantization",
        ),
        ({"load_in_8bit": True}, "int8"),
    ],
    ids=["fp4", "nf4", "int8"],
)
@pytest.mark.parametrize("shardable", [False, True], ids=["plain", "shardable"])
def test_a_printed_model_shows_codec_shape_and_bytes(
    config: dict[str, Any], codec: str, shardable: bool
) -> None:
    model = tiny_model("qwen3_moe")
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**config))
    if shardable:
        moe_qlora.prepare_sharding(model)
    module = model.get_submodule("model.layers.0.mlp.experts")
    lines = {line.strip() for line in repr(model).splitlines() if "Packed(" in line}
    expected = set()
    for name, shape in (("gate_up_proj", "(4, 80, 64)"), ("down_proj", "(4, 64, 40)")):
        size = human_bytes(parametrize.read_packed(module, name).nbytes)
        expected.add(f"({name}): Packed({codec}, {shape} float32, {size})")
    assert lines == expected
    wrapped = moe_qlora.get_peft_model(model, LoraConfig(target_modules=["q_proj"]), experts=True)
    assert all(line in repr(wrapped) for line in expected)
    assert all(line in repr(copy.deepcopy(model).to("meta")) for line in expected)
