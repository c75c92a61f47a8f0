"""A LoRA config adapted to a model that is not loaded is the one adapted to the packed model."""

from __future__ import annotations

import pytest
import representatives
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora import testing
from moe_qlora.lora import targets as lora_names

TYPES = representatives.first(testing.registry_families())
BNB = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def said(config):
    """Every field, with sets and lists in one order."""
    left_out = ("_awaited", "_packed", "_edits", "_custom_modules")
    return {
        field: sorted(value) if isinstance(value, (set, list)) else value
        for field, value in vars(config).items()
        if field not in left_out
    }


@pytest.mark.parametrize("model_type", representatives.cases(TYPES))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_same_config(model_type):
    packed = testing.tiny_model(model_type)
    moe_qlora.quantize_experts(packed, BNB)
    # Inkling2's q_proj is a module around a Linear layer since transformers 5.24.
    names = [["down_proj", "q_proj", "q_proj.linear"]] if TYPES.index(model_type) % 4 == 0 else []
    for targets in ("all-linear", *names):
        asked = LoraConfig(r=2, target_modules=targets)
        loaded = moe_qlora.adapt_lora_config(packed, asked, experts=True, router=True)
        unloaded = moe_qlora.adapt_lora_config(
            testing.tiny_config(model_type),
            asked,
            experts=True,
            router=True,
            quantization_config=BNB,
        )
        assert said(unloaded) == said(loaded)
        names = frozenset(lora_names.packed_parameters(packed))
        assert unloaded._packed.experts == names
        assert unloaded.to_dict()["target_modules"] == loaded.to_dict()["target_modules"]
