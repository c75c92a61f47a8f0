"""Plans of any settings of a step, with or without a search."""

from typing import Any

import torch
from transformers import Qwen3MoeConfig

from moe_qlora.planning.plan import plan_settings
from moe_qlora.planning.report import MemoryPlan
from moe_qlora.testing import tiny_model

DOUBLE = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
DOUBLE |= {"bnb_4bit_compute_dtype": "bfloat16"}
MEASURED = {**DOUBLE, "llm_int8_skip_modules": [r"model.layers.\d+.self_attn", "lm_head"]}
"""Packing of the models whose steps were measured: Linear layers were not packed."""


def qwen3_30b(**changes: Any) -> Qwen3MoeConfig:
    """Return the configuration of Qwen3-30B-A3B."""
    sizes = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "dtype": "bfloat16",
    }  # fmt: skip
    return Qwen3MoeConfig(**(sizes | changes))


def small(**changes: Any) -> Qwen3MoeConfig:
    """Return the configuration of a small model of the same type."""
    sizes = {"num_hidden_layers": 6, "vocab_size": 512, "hidden_size": 64, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    return qwen3_30b(**(sizes | {"num_experts": 8, "num_experts_per_tok": 2} | changes))


def config_of(family: str = "qwen3_moe", layers: int = 4, **sizes: Any) -> Any:
    """Return the configuration of a tiny model with enough layers for some to repeat."""
    sizes = {"num_hidden_layers": layers, "layer_types": None} | sizes
    return tiny_model(family, device="meta", dtype=torch.bfloat16, **sizes).config


_OTHERS = ("lora_config", "gpus", "engine", "memory", "search")


def plan(model: Any, quantization_config: Any = None, **asked: Any) -> MemoryPlan:
    """Return the plan for fields of `Settings`, and for other arguments of `plan_settings`."""
    others = {name: asked.pop(name) for name in _OTHERS if name in asked}
    for name in asked.keys() & {"ddp", "fsdp"}:
        others["engine"] = f"{name}:{asked.pop(name)}"
    asked = {name: value for name, value in asked.items() if value is not None}
    return plan_settings(model, quantization_config, asked, **others)
