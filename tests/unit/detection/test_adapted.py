"""A model with adapters has the layout of the model without."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.layout import unwrapped_name
from moe_qlora.testing import tiny_model


def facts(model: nn.Module) -> Any:
    layout = moe_qlora.detect(model)
    experts = [(e.name, e.role, e.transposed, e.orientation_evidence) for e in layout.experts]
    routers = [(router.name, router.num_choices) for router in layout.routers]
    return [[(unwrapped_name(name), *rest) for name, *rest in each] for each in (experts, routers)]


# A router of several layers with a choice of no expert; matrices of equal sides, either way round.
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("zaya", {}),
        ("gpt_oss", {"hidden_size": 64, "intermediate_size": 64}),
        ("dbrx", {}),
        ("jetmoe", {"kv_channels": 32}),
        ("inkling_text", {}),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_adapters_change_nothing(model_type: str, sizes: dict[str, int], packed: bool) -> None:
    model = tiny_model(model_type, **sizes)
    expected = facts(model)
    assert expected[0]
    if packed:
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    names = sorted({experts.name for experts in moe_qlora.detect(model).experts})
    config = LoraConfig(r=2, target_modules="all-linear", target_parameters=names)
    peft_model = moe_qlora.get_peft_model(model, config, unpacked_ok=True)
    assert facts(peft_model.get_base_model()) == expected
