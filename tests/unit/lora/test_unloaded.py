"""adapt_lora_config for models that are not loaded: what it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora import testing
from moe_qlora.checkpoint import training_codec

BNB = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")
LORA = LoraConfig(r=2, target_modules=["q_proj"])
EXPERTS = {
    f"model.layers.{layer}.mlp.experts.{name}"
    for layer in range(2)
    for name in ("gate_up_proj", "down_proj")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("unloaded") / "model"
    testing.tiny_model("qwen3_moe").save_pretrained(path)
    return path


def adapt(model, config=LORA, **options):
    return moe_qlora.adapt_lora_config(model, config, **{"quantization_config": BNB, **options})


@pytest.mark.parametrize("kind", [str, Path, AutoConfig.from_pretrained])
def test_ways_to_name_a_model(kind, folder):
    adapted = adapt(kind(folder), experts=True)
    assert set(adapted.target_parameters) == EXPERTS
    assert LORA.target_parameters is None


def test_skipped_stacks_are_left_out(folder):
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["layers.0.mlp.experts"])
    adapted = adapt(folder, experts=True, quantization_config=config)
    assert set(adapted.target_parameters) == {name for name in EXPERTS if "layers.1." in name}


def test_packed_folder_needs_no_config(folder, tmp_path):
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BNB)
    model.save_pretrained(tmp_path / "packed")
    adapted = adapt(tmp_path / "packed", experts=True, quantization_config=None)
    assert set(adapted.target_parameters) == EXPERTS
    assert adapted._packed == training_codec.from_packed(model)


@pytest.mark.parametrize("switch", [True, False])
def test_stock_peft_takes_it_on_a_packed_model_only(switch, folder):
    adapted = adapt(folder, experts=True)
    if switch:
        moe_qlora.enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BNB)
    finally:
        moe_qlora.disable()
    if not switch:
        with pytest.raises(moe_qlora.ConfigError, match=r"gate_up_proj is not packed.*enable\(\)"):
            peft.get_peft_model(model, adapted)
        return
    wrapped = moe_qlora.connect_adapters(peft.get_peft_model(model, adapted))
    loss = wrapped(**testing.tiny_inputs(model)).logits.float().square().mean()
    loss.backward()
    trained = [name for name, value in wrapped.named_parameters() if value.grad is not None]
    assert len([name for name in trained if "experts" in name and "lora_B" in name]) == 4


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (None, {}, moe_qlora.ConfigError, "model is a NoneType: give a built nn.Module or"),
        ("./gone", {}, moe_qlora.CheckpointError, "./gone does not exist"),
        ("a/b/c", {}, moe_qlora.CheckpointError, "no hub id"),
        ("mixtral", {"config": None}, moe_qlora.ConfigError, "lora_config is a NoneType"),
        ("mixtral", {"quantization_config": None}, moe_qlora.ConfigError, "pass the BitsAndBytes"),
        (
            "mixtral",
            {"quantization_config": BitsAndBytesConfig()},
            moe_qlora.ConfigError,
            "neither 4 nor 8 bit",
        ),
        ("mixtral", {"experts": ["side"]}, moe_qlora.ConfigError, "has the role 'side'"),
        ("llama", {"experts": True}, moe_qlora.ConfigError, "a load of this llama model"),
        (
            "mixtral",
            {"experts": True, "config": LoraConfig(target_modules=["q_proj"], use_dora=True)},
            moe_qlora.ConfigError,
            "use_dora=True does not work for LoRA on packed experts",
        ),
    ],
)
def test_refusals(model, options, error, message):
    with pytest.raises(error, match=message) as caught:
        adapt(model, **options)
    assert "\n" not in str(caught.value)


def test_a_loaded_model_has_its_own_settings():
    model = testing.tiny_model("qwen3_moe")
    with pytest.raises(moe_qlora.ConfigError, match="leave it out, or name the model's folder"):
        adapt(model)
