"""Configurations as they are named, and as a model in memory has them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BitsAndBytesConfig

from moe_qlora.errors import CheckpointError
from moe_qlora.models import named
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_config


@pytest.mark.parametrize("bits", [4, 8])
def test_a_live_configuration_says_how_it_is_packed(bits):
    """Loaded models hold the object that they were loaded with, files its dict."""
    asked = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype="float16")
    of_file = tiny_config("qwen3_moe", quantization_config=asked.to_dict(), dtype=torch.bfloat16)
    of_model = tiny_config("qwen3_moe", dtype=torch.bfloat16)
    of_model.quantization_config = asked
    for config in (of_file, of_model):
        source = named.resolve(config)
        assert source.settings == CodecSettings.from_config(asked)
        assert not source.notes


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
@pytest.mark.parametrize("part", [0, "x", []])
def test_a_part_that_is_no_configuration_is_named(tmp_path, family, part):
    content = {"model_type": family, "text_config": part}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="text_config"):
        named.resolve(tmp_path)
