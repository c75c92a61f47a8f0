"""LoRA for small models, and how what they compute is compared."""

import copy
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from moe_qlora.packing import parametrize

IDS = torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(0))


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
