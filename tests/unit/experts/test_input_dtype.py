"""Experts with a forward of their own read weights in the dtype of their input, as Linear4bit."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import tiny_inputs, tiny_model

CONFIG = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
OWN_FORWARD = ("dbrx", "inkling_text", "jetmoe", "llama4_text", "longcat_flash", "step3p7")


def packed_pair(model_type: str) -> tuple[Any, Any]:
    """A packed bf16 model with all else in fp32, and the same weights in plain fp32."""
    model = tiny_model(model_type, dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, CONFIG)
    plain = copy.deepcopy(model).dequantize().float()
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), plain


def adapted(model: Any, packed: bool) -> Any:
    names = [name for name, _ in model.named_modules() if name.endswith("q_proj")][:1]
    if packed:
        config = LoraConfig(r=2, target_modules=names or None)
        made = moe_qlora.get_peft_model(model, config, experts=True)
    else:
        weights = sorted(moe_qlora.detect(model).experts, key=lambda param: param.name)
        weights = [param.name for param in weights]
        made = peft.get_peft_model(
            model, LoraConfig(r=2, target_modules=names or None, target_parameters=weights)
        )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(made.named_parameters()):
        if ".lora_" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return made


@pytest.mark.parametrize("model_type", OWN_FORWARD)
def test_packed_experts_compute_as_plain_ones_do_in_fp32(model_type: str) -> None:
    model, plain = packed_pair(model_type)
    inputs = tiny_inputs(plain)
    with torch.no_grad():
        expected = plain(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        model.generate(input_ids=inputs["input_ids"][:, :3], max_new_tokens=2, pad_token_id=0)


# Stock PEFT cannot serve dbrx, whose experts' weights are read from outside.
@pytest.mark.parametrize("model_type", OWN_FORWARD[1:])
def test_lora_on_them_has_the_gradients_of_stock_peft_in_fp32(model_type: str) -> None:
    model, plain = packed_pair(model_type)
    inputs = tiny_inputs(plain)
    model, plain = adapted(model, True), adapted(plain, False)
    gradients = []
    for each in (model, plain):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
        named = sorted((n, p.grad) for n, p in each.named_parameters() if p.grad is not None)
        gradients.append(dict(named))
    assert set(gradients[0]) == set(gradients[1])
    assert any("experts" in name or "linear" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5, msg=name)


def test_lora_on_experts_that_are_read_from_outside_is_the_merged_weight() -> None:
    model, plain = packed_pair("dbrx")
    assert model.transformer.blocks[0].ffn.experts.mlp.w1.dtype == torch.bfloat16  # Its own
    inputs = tiny_inputs(plain)
    model = adapted(model, True)
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if ".lora_" in n)
    with torch.no_grad():
        merged = model.merge_and_unload(dtype=torch.float32)(**inputs)
    torch.testing.assert_close(out.logits, merged.logits, rtol=1e-4, atol=1e-5)
