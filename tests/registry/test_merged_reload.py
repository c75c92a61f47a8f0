"""Merged models that stock transformers saves and loads compute what the packed one did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from small_models import fill
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora import testing

FAMILIES = ["qwen3_moe", "gpt_oss", "granitemoe", "llama4_text"]
BNB: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


def adapted(model: Any) -> Any:
    targets = moe_qlora.target_parameters(model)
    config = LoraConfig(r=4, target_modules=[], target_parameters=targets)
    return fill(moe_qlora.get_peft_model(model, config), size=0.1).eval()


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_merged_saved_and_loaded_by_stock_transformers(model_type: str, tmp_path: Path) -> None:
    model = testing.tiny_model(model_type)
    inputs = testing.tiny_inputs(model)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**BNB))
    peft_model = adapted(model)
    before = logits(peft_model, inputs)
    merged = peft_model.merge_and_unload()
    assert not getattr(merged.config, "quantization_config", None)
    assert not merged.is_loaded_in_4bit and not getattr(merged, "is_quantized", False)
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path).eval()
    assert torch.allclose(logits(loaded, inputs), before, atol=1e-5)
