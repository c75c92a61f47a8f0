"""Well-known checkpoints at their own sizes, on meta: the experts' share of the published total."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import initialization

import moe_qlora
from moe_qlora import registry, testing

# billions of weights as their makers state them, whole models
TOTAL = {
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "allenai/OLMoE-1B-7B-0924": 6.9,
    "deepseek-ai/DeepSeek-V3": 671,
    "mistralai/Mixtral-8x22B-v0.1": 141,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "openai/gpt-oss-120b": 117,
    "openai/gpt-oss-20b": 20.9,
    "zai-org/GLM-4.5": 355,
    "zai-org/GLM-4.5-Air": 106,
}
KNOWN = {
    name: (model_type, sizes)
    for model_type in registry.model_types()
    for name, sizes in registry.load(model_type).checkpoints.items()
}


def test_every_checkpoint_on_record_is_checked():
    assert set(KNOWN) == set(TOTAL)


@pytest.mark.parametrize("name", TOTAL)
def test_experts_are_most_of_the_published_total(name):
    model_type, sizes = KNOWN[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"), initialization.no_init_weights():
        model = testing.model_class(model_type)._from_config(config)
    weights = sum(param.numel for param in moe_qlora.detect(model)) / 1e9
    assert 0.9 * TOTAL[name] < weights < TOTAL[name]
