"""4-bit LoRA fine-tuning (QLoRA) of Mixture-of-Experts models on transformers v5.

The public names below are loaded on first use: importing the package starts no accelerator and
imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The one eager import: `detect` names a function and its module, and Python binds a submodule on
# its package when it is first imported, which would hide the function. The module itself imports
# torch only when it is called.
from .detect import detect

if TYPE_CHECKING:
    from .checkpoint_merge import merge_adapter as merge_adapter
    from .checkpoint_quantize import quantize_checkpoint as quantize_checkpoint
    from .errors import AdapterError as AdapterError
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DetectionError as DetectionError
    from .errors import MoeQloraError as MoeQloraError
    from .errors import NonFiniteWeightError as NonFiniteWeightError
    from .errors import QuantizationError as QuantizationError
    from .errors import UnsupportedWeightError as UnsupportedWeightError
    from .experts_tune import tune_kernels as tune_kernels
    from .hf import disable as disable
    from .hf import enable as enable
    from .hf import enabled as enabled
    from .layout import ExpertParam as ExpertParam
    from .layout import ModelLayout as ModelLayout
    from .peft import adapt_lora_config as adapt_lora_config
    from .peft import connect_adapters as connect_adapters
    from .peft import exclude_modules as exclude_modules
    from .peft import get_peft_model as get_peft_model
    from .peft import load_adapter as load_adapter
    from .peft import target_parameters as target_parameters
    from .plan_model import MemoryPlan as MemoryPlan
    from .plan_model import plan as plan
    from .quantize import QuantizationReport as QuantizationReport
    from .quantize import quantize_experts as quantize_experts

__version__ = "0.1.0"

_HOME = {
    "AdapterError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DetectionError": "errors",
    "ExpertParam": "layout",
    "MemoryPlan": "memory_report",
    "ModelLayout": "layout",
    "MoeQloraError": "errors",
    "NonFiniteWeightError": "errors",
    "QuantizationError": "errors",
    "QuantizationReport": "quantize",
    "UnsupportedWeightError": "errors",
    "adapt_lora_config": "peft",
    "connect_adapters": "peft",
    "disable": "hf",
    "enable": "hf",
    "enabled": "hf",
    "exclude_modules": "peft",
    "get_peft_model": "peft",
    "load_adapter": "peft",
    "merge_adapter": "checkpoint_merge",
    "plan": "plan_model",
    "quantize_checkpoint": "checkpoint_quantize",
    "quantize_experts": "quantize",
    "target_parameters": "peft",
    "tune_kernels": "experts_tune",
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
