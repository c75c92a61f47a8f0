"""On a CUDA device: what the doctor says of it is what a forward there does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts.backend import choose_backend, kernels_run, read_call
from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.gpu

BF16 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
FP32 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64}


def test_the_device():
    report = moe_qlora.doctor()
    assert report.device.name == torch.cuda.get_device_name(0)
    assert report.device.nbytes == torch.cuda.get_device_properties(0).total_memory
    fast = kernels_run(torch.device("cuda", 0))
    assert ("quantized matmul" in report.device.few_tokens) == fast


@pytest.mark.parametrize(
    ("model_type", "asked", "rank", "sizes"),
    [
        ("qwen3_moe", BF16, 16, WIDE),
        ("qwen3_moe", FP32, 16, WIDE),
        ("qwen3_moe", BF16, 256, WIDE),
        ("qwen3_moe", BF16, 16, {"hidden_size": 64, "moe_intermediate_size": 36}),
        ("gpt_oss", BF16, 16, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is computed in float32")
def test_backends_are_those_of_a_forward(model_type, asked, rank, sizes):
    model: Any = tiny_model(model_type, dtype=torch.bfloat16, **sizes)
    report = moe_qlora.doctor(model.config, asked, rank=rank)
    moe_qlora.quantize_experts(model.cuda(), asked)
    lora = LoraConfig(r=rank, target_modules=["q_proj"])
    adapted: Any = moe_qlora.get_peft_model(model, lora, experts=True)
    base = adapted.get_base_model()
    found = set()
    for entry in moe_qlora.detect(base).modules:
        module = base.get_submodule(entry.name)
        hidden = entry.parameters[0].in_features
        call = read_call(module, torch.zeros(5, hidden, dtype=torch.bfloat16, device="cuda"))
        assert all(len(factors) == 1 for factors in call.lora)
        chosen = choose_backend(module, call)
        found.add((chosen.name, chosen.reason))
    assert {(layer.backend, layer.reason) for layer in report.layers} == found
