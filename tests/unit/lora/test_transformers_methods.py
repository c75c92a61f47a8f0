"""transformers' own ways to adapters, over packed experts: folders, load_adapter, add_adapter."""

from __future__ import annotations

import copy

import pytest
import torch
import upstream
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import testing

BNB = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def lora_config(model, **options):
    targets = moe_qlora.target_parameters(model)
    return LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, **options)


def packed(folder):
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BNB)


def randomize(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(**testing.tiny_inputs(model)).logits


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def base(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    testing.tiny_model(request.param).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """The folder of an adapter with effect, and the logits that it gives."""
    model = packed(base)
    wrapped = randomize(moe_qlora.get_peft_model(model, lora_config(model)))
    path = tmp_path_factory.mktemp("adapter")
    wrapped.save_pretrained(path)
    expected = logits(wrapped)
    with wrapped.disable_adapter():
        assert not torch.allclose(logits(wrapped), expected, atol=1e-3)
    return path, expected


def test_auto_class_on_the_folder_of_an_adapter(adapter):
    path, expected = adapter
    model = packed(path)
    assert len(moe_qlora.target_parameters(model)) == 4
    assert torch.equal(logits(model), expected)


@upstream.ADAPTER_METHODS
@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
def test_adapters_are_switched(base, adapter):
    path, expected = adapter
    model = packed(base)
    plain = logits(model)
    model.load_adapter(str(path))
    model.disable_adapters()
    assert torch.equal(logits(model), plain)
    model.load_adapter(str(path), "second")
    model.set_adapter("second")
    model.enable_adapters()
    assert torch.equal(logits(model), expected)


@upstream.ADAPTER_METHODS
def test_add_adapter_trains_and_is_saved(base, tmp_path):
    model = packed(base)
    asked = lora_config(model)
    model.add_adapter(asked)
    assert asked.exclude_modules is None
    randomize(model)
    model.train()
    model(**testing.tiny_inputs(model)).logits.float().square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if "experts" in n and "lora" in n}
    assert len(grads) == 8
    assert all(grad is not None and grad.any() for grad in grads.values())
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    again = moe_qlora.load_adapter(packed(base), str(tmp_path))
    assert torch.equal(logits(again), logits(model))


def test_copies_are_adapted_by_themselves(base, adapter, tmp_path):
    path, expected = adapter
    (tmp_path / "inner").symlink_to(path)
    model = packed(base)
    plain = logits(model)
    twin = copy.deepcopy(model)
    twin.load_adapter(str(tmp_path), adapter_kwargs={"subfolder": "inner"})
    assert torch.equal(logits(twin), expected)
    assert torch.equal(logits(model), plain)


def test_methods_go_with_the_packed_experts(base):
    model = packed(base)
    assert {"add_adapter", "load_adapter"} <= model.__dict__.keys()
    model.dequantize()
    assert not {"add_adapter", "load_adapter"} & model.__dict__.keys()
