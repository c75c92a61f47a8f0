"""Small packed models of several architectures, and LoRA for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moe_qlora.experts import forward
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings

SMALL = {"vocab_size": 48, "hidden_size": 24, "num_hidden_layers": 2, "num_experts_per_tok": 2}
SMALL |= {"num_attention_heads": 3, "num_key_value_heads": 3}
WIDTH = "moe_intermediate_size"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, WIDTH: 12, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, WIDTH: 12, "shared_expert_intermediate_size": 20},
    "mixtral": {"num_local_experts": 3, "intermediate_size": 20},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 20, "head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {WIDTH: 12, "intermediate_size": 20, "first_k_dense_replace": 1, "v_head_dim": 8}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "llama4_text": {"num_local_experts": 4, "intermediate_size": 12, "num_experts_per_tok": 1}
    | {"intermediate_size_mlp": 20, "interleave_moe_layer_step": 1, "head_dim": 8},
}
OUTSIDE_THE_INTERFACE = {"llama4_text"}
IDS = torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(0))


def build(
    model_type: str = "qwen3_moe", implementation: str = "moe_qlora", kind: str = "nf4"
) -> Any:
    """A small packed model that runs its experts through this package, or through another."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config)
    settings = CodecSettings(kind)
    names = []
    for module_name, module in list(model.named_modules()):
        stacks = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
        for name, weight in stacks:
            parametrize.attach(module, name, codec.pack(weight, settings))
        if stacks:
            names.append(module_name)
    if implementation == "moe_qlora" and model_type not in OUTSIDE_THE_INTERFACE:
        forward.activate(model, names)
    elif model_type not in OUTSIDE_THE_INTERFACE:
        model.set_experts_implementation(implementation)
    return model.eval()


def decoded(model: Any) -> Any:
    """A copy with every packed weight decoded for good, on the loop over experts."""
    twin = copy.deepcopy(model)
    for _, module, name in list(parametrize.iter_packed(twin)):
        if parametrize.is_packed(module, name):  # tied ones are met twice
            parametrize.detach(module, name)
    for module in twin.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "eager"
    return twin


def slow_delta(wrapper: Any, a: Tensor, b: Tensor, adapter: str = "default") -> Tensor:
    """s B A, one expert after the other, straight from PEFT's layout of lora_A and lora_B."""
    shape, rank = wrapper.get_param().shape, wrapper.r[adapter]
    count = shape[0] if len(shape) == 3 else 1
    transposed = getattr(wrapper.get_base_layer(), "is_transposed", False) and len(shape) == 3
    each = []
    for e in range(count):
        delta = b[:, torch.arange(rank) * count + e] @ a[e * rank : (e + 1) * rank]
        each.append(delta.T if transposed else delta)
    whole = torch.stack(each).view(shape)
    return whole * (wrapper.lora_alpha[adapter] / rank)


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(input_ids=ids).logits
    return result


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether the largest difference is that small beside the largest value."""
    scale = right.abs().max().clamp(min=1e-12)
    return bool((left - right).abs().max() / scale < tolerance)


def lora_config(**changes: Any) -> LoraConfig:
    settings: dict[str, Any] = {
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "r": 3,
        "lora_alpha": 7,
    }
    return LoraConfig(**{**settings, **changes})


def fill(model: Any, seed: int = 1, size: float = 0.2) -> Any:
    """Give every LoRA weight a value that is not zero, of this size; return the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * size
    return model
