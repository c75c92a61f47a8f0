"""Makes a model with packed experts look to its hosts as if bitsandbytes had loaded it.

Trainer, accelerate and PEFT ask the model, not its weights: `is_loaded_in_4bit`, `hf_quantizer`,
`quantization_method`, `config.quantization_config`. Some methods are replaced on the instance,
because the stock ones know Linear layers only: `dequantize`, `get_memory_footprint`,
`save_pretrained`, `load_adapter` and `add_adapter`. They are bound methods in the model's
`__dict__`, so that deepcopy binds the copy's to the copy, and `release` takes them off again.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

from . import quantize_guard, storage
from .codec import CodecSettings, state_tensors, unpack

# bound with the others of `_METHODS`
from .quantize_adapters import add_adapter, load_adapter  # noqa: F401
from .quantize_save import save_pretrained  # noqa: F401

_METHODS = (
    "add_adapter",
    "dequantize",
    "get_memory_footprint",
    "load_adapter",
    "save_pretrained",
)


def check_method(model: nn.Module, settings: CodecSettings) -> str | None:
    """Why the model cannot become a bitsandbytes model of this kind; None where it can."""
    method = getattr(model, "quantization_method", None)
    name = str(getattr(method, "value", method))
    if method is not None and not name.startswith("bitsandbytes"):
        return f"the model is already quantized with {name!r}"
    asked, other = ("8bit", "4bit") if settings.kind == "int8" else ("4bit", "8bit")
    if getattr(model, f"is_loaded_in_{other}", False):
        return f"it asks for load_in_{asked}, and the model is already loaded in {other}"
    return None


def adopt(model: nn.Module, config: Any, settings: CodecSettings) -> None:
    """Give the model the attributes and methods of a bitsandbytes model; idempotent.

    Args:
        model: Its experts are packed.
        config: The `BitsAndBytesConfig` or dict that they were packed with; a copy is stored.
        settings: The same, as read by the codec.
    """
    from transformers import BitsAndBytesConfig, PreTrainedModel
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    host: Any = model
    host.is_loaded_in_8bit = settings.kind == "int8"
    host.is_loaded_in_4bit = settings.kind != "int8"
    if getattr(host, "quantization_method", None) is None:
        host.quantization_method = QuantizationMethod.BITS_AND_BYTES
    host.is_quantized = True
    quantize_guard.install(model)
    if not isinstance(model, PreTrainedModel):
        return
    if getattr(host, "hf_quantizer", None) is None:
        config = copy.deepcopy(config)
        if isinstance(config, dict):
            config = BitsAndBytesConfig.from_dict(config)
        host.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        host.hf_quantizer.postprocess_model(model)
    for name in _METHODS:
        if name not in model.__dict__:
            model.__dict__[name] = MethodType(globals()[name], model)


def release(model: nn.Module) -> None:
    """Take the instance's methods and the adapter check off again."""
    quantize_guard.remove(model)
    for name in _METHODS:
        method = model.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is globals()[name]:
            del model.__dict__[name]


def settle(model: nn.Module) -> None:
    """Take back what `adopt` gave where no expert is packed any more, after a merge for one.

    A model that still has bitsandbytes Linear layers goes on as what it was loaded as.
    """
    from . import experts

    if next(storage.iter_packed(model), None) is not None:
        return
    experts.deactivate(model)
    release(model)
    host: Any = model
    if getattr(host, "hf_quantizer", None) is not None and not _has_packed_linears(model):
        host.hf_quantizer.remove_quantization_config(model)
        host.is_loaded_in_4bit = host.is_loaded_in_8bit = False


def _has_packed_linears(model: nn.Module) -> bool:
    import bitsandbytes as bnb

    linears = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return any(isinstance(module, linears) for module in model.modules())


def get_memory_footprint(self: Any, return_buffers: bool = True) -> int:
    """Bytes of the model: parameters, buffers, and the statistics of everything that is packed.

    The stock method counts packed codes but no statistics, which sit on no parameter or buffer.
    """
    total: int = type(self).get_memory_footprint(self, return_buffers=return_buffers)
    states: dict[int, Any] = {}
    scales: dict[int, torch.Tensor] = {}
    # An 8-bit Linear keeps its scales on the weight, and after its first forward on its state.
    holders = [module.state for module in self.modules() if hasattr(module, "state")]
    for parameter in self.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            states[id(state)] = state
        holders.append(parameter)
    for holder in holders:
        scale = getattr(holder, "SCB", None)
        if isinstance(scale, torch.Tensor):
            scales[scale.data_ptr()] = scale
    for _, module, name in storage.iter_packed(self):
        stack = storage.read_packed(module, name)
        if stack.kind == "int8":
            if not return_buffers:
                scales[stack.state.scales.data_ptr()] = stack.state.scales
        else:
            states[id(stack.state)] = stack.state
    total += sum(scale.nbytes for scale in scales.values())
    return total + sum(t.nbytes for state in states.values() for t in state_tensors(state))


def dequantize(self: Any, dtype: torch.dtype | None = None) -> Any:
    """Decode experts and Linear layers in place and return the model, no longer quantized.

    Args:
        self: The model.
        dtype: Of the decoded weights; None is each stack's own, and the model's for Linear layers.
    """
    decode_experts(self, dtype)
    settle(self)
    # The stock method cannot do without at least one such layer.
    if _has_packed_linears(self):
        type(self).dequantize(self, dtype=dtype)
    self.is_loaded_in_4bit = self.is_loaded_in_8bit = False
    return self


def decode_experts(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Turn every packed stack back into a plain parameter; tied ones stay tied."""
    plain: dict[int, nn.Parameter] = {}
    for _, module, name in list(storage.iter_packed(model)):
        stack = storage.read_packed(module, name)
        key = id(storage.original_of(module, name))
        if key not in plain:
            weight = unpack(stack)
            plain[key] = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
        storage.detach(module, name, plain[key])
