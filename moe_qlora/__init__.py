"""4-bit LoRA fine-tuning (QLoRA) of Mixture-of-Experts models on transformers v5.

The public names below are loaded on first use: importing the package starts no accelerator and
imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.merge import merge_adapter
    from .checkpoint.quantize import quantize_checkpoint
    from .detection.detect import detect
    from .errors import (
        AdapterError,
        CheckpointError,
        ConfigError,
        DetectionError,
        MoeQloraError,
        NonFiniteWeightError,
        QuantizationError,
        UnsupportedWeightError,
    )
    from .experts.tune import tune_kernels
    from .hf.switch import disable, enable, enabled
    from .kernels.workspace import set_scratch_cap, set_workspace_cap
    from .layout import ExpertParam, ModelLayout
    from .lora.config import adapt_lora_config
    from .lora.load import load_adapter
    from .lora.model import connect_adapters, get_peft_model
    from .lora.targets import exclude_modules, target_parameters
    from .memory.plan import plan
    from .memory.report import MemoryPlan
    from .quantize import QuantizationReport, quantize_experts


__version__ = "0.1.0"

_HOME = {
    "AdapterError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DetectionError": "errors",
    "ExpertParam": "layout",
    "MemoryPlan": "memory.report",
    "ModelLayout": "layout",
    "MoeQloraError": "errors",
    "NonFiniteWeightError": "errors",
    "QuantizationError": "errors",
    "QuantizationReport": "quantize",
    "UnsupportedWeightError": "errors",
    "adapt_lora_config": "lora.config",
    "connect_adapters": "lora.model",
    "detect": "detection.detect",
    "disable": "hf.switch",
    "enable": "hf.switch",
    "enabled": "hf.switch",
    "exclude_modules": "lora.targets",
    "get_peft_model": "lora.model",
    "load_adapter": "lora.load",
    "merge_adapter": "checkpoint.merge",
    "plan": "memory.plan",
    "quantize_checkpoint": "checkpoint.quantize",
    "quantize_experts": "quantize",
    "set_scratch_cap": "kernels.workspace",  # the earlier name of set_workspace_cap
    "set_workspace_cap": "kernels.workspace",
    "target_parameters": "lora.targets",
    "tune_kernels": "experts.tune",
}


__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "DetectionError",
    "ExpertParam",
    "MemoryPlan",
    "ModelLayout",
    "MoeQloraError",
    "NonFiniteWeightError",
    "QuantizationError",
    "QuantizationReport",
    "UnsupportedWeightError",
    "adapt_lora_config",
    "connect_adapters",
    "detect",
    "disable",
    "enable",
    "enabled",
    "exclude_modules",
    "get_peft_model",
    "load_adapter",
    "merge_adapter",
    "plan",
    "quantize_checkpoint",
    "quantize_experts",
    "set_scratch_cap",
    "set_workspace_cap",
    "target_parameters",
    "tune_kernels",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
