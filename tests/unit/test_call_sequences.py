"""A long story of public calls on a packed model, held against plain fp32 weights after each call.

Base weights are decoded once; every adapter is on all experts.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from oracle import Oracle, factors_of
from peft import LoraConfig
from torch import nn
from training import SETTINGS
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import model_class, tiny_model
from moe_qlora.train import offload

pytestmark = pytest.mark.filterwarnings("ignore")


def read_base(oracle: Oracle, model: Any) -> None:
    """Decode what is packed; hold it against the weights before."""
    for name, before in oracle.base.items():
        path, _, leaf = name.rpartition(".")
        weight = getattr(model.get_submodule(path), leaf)
        state = getattr(weight, "quant_state", None)
        weight = (weight if state is None else dequantize_4bit(weight, state)).detach()
        packed = state is not None or moe_qlora.detect(model).find(name) is not None
        off, norm = (weight.float() - before).norm(), before.norm()
        assert off <= (0.2 if packed else 1e-6) * norm, f"{name}: {off}"  # FP4 rounds by 0.12
        oracle.base[name] = weight.float().clone()  # a merge writes into plain layers


def load(family: str, codec: str, way: str, folder: Path) -> tuple[Any, Oracle, Any]:
    """A packed model, its oracle, and the config that it was packed with."""
    tiny_model(family, dtype=torch.bfloat16, initializer_range=0.1).save_pretrained(folder / "a")
    cls, stock = model_class(family), {"dtype": torch.float32, "experts_implementation": "eager"}
    # A forward in fp32 rounds by 1e-5; trained factors can make attention steep.
    oracle = Oracle(cls.from_pretrained(folder / "a", **stock), 5e-4)
    linears = {n: m for n, m in oracle.twin.named_modules() if type(m) is nn.Linear}
    # bitsandbytes' int8 rounds activations too, and its CPU kernels want whole blocks.
    skip = [n for n, m in linears.items() if codec == "int8" or m.in_features % 64]
    given = {**SETTINGS[codec], "llm_int8_skip_modules": [*skip, "lm_head"]}
    config = BitsAndBytesConfig(**given, bnb_4bit_compute_dtype=torch.float32)
    if way == "after loading":
        model: Any = cls.from_pretrained(folder / "a", dtype=torch.float32)
        moe_qlora.quantize_experts(model, config)
    elif way == "while loading":
        with moe_qlora.enabled(offload=True):
            model = cls.from_pretrained(
                folder / "a", dtype=torch.float32, quantization_config=config
            )
    else:
        moe_qlora.quantize_checkpoint(folder / "a", folder / "packed", config)
        with moe_qlora.enabled():
            model = cls.from_pretrained(folder / "packed", dtype=torch.float32)
    read_base(oracle, model)
    return model, oracle, config


@pytest.mark.parametrize(
    ("family", "codec", "way"),
    [
        ("qwen3_moe", "nf4", "while loading"),
        ("gpt_oss", "fp4", "of a packed folder"),
        ("llama4_text", "int8", "after loading"),
    ],
)
def test_a_long_story_agrees_with_plain_weights(family, codec, way, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "SLOTS", 1)  # two layers share a slot
    model, oracle, config = load(family, codec, way, tmp_path)
    off = moe_qlora.offload_experts(model)
    oracle.check(model)

    first = LoraConfig(r=8, lora_alpha=7, target_modules=["k_proj", "o_proj"])
    model = moe_qlora.get_peft_model(model, first, "one", experts=True)
    oracle.take(model, "one", 7 / 8)
    oracle.train(model, "one")
    second = LoraConfig(r=2, lora_alpha=16, target_modules="all-linear", use_rslora=True)
    model.add_adapter("two", moe_qlora.adapt_lora_config(model, second, experts=True))
    oracle.take(model, "two", 16 / 2**0.5)
    oracle.check(model, "one")
    off.remove()
    oracle.train(model, "two", "one")
    with model.disable_adapter():
        oracle.check(model)

    model.save_pretrained(tmp_path, selected_adapters=["one"])
    model = moe_qlora.load_adapter(model, str(tmp_path / "one"), "three")
    model.load_adapter(tmp_path / "one", "four")
    for name in ("three", "four"):
        oracle.adapters[name] = oracle.adapters["one"]
        for key, pair in factors_of(model, name).items():
            assert all(map(torch.equal, pair, oracle.adapters["one"][0][key])), key
    off, model = moe_qlora.offload_experts(model), copy.deepcopy(model)  # whose experts are here
    for name in ("one", "four"):
        model.delete_adapter(name)
        del oracle.adapters[name]
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    oracle.train(model, "three")
    model.gradient_checkpointing_disable()

    model.merge_adapter(dtype=torch.float32)
    oracle.check(model, "three")
    model.unmerge_adapter()
    oracle.check(model, "three")
    oracle.base = oracle.weights(["three"])
    oracle.adapters = {}
    model = model.merge_and_unload(dtype=torch.float32)
    oracle.check(model)
    moe_qlora.quantize_experts(model, config)
    read_base(oracle, model)
    oracle.check(model)
