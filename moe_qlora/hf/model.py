"""Marks a model with packed experts as one that bitsandbytes has loaded.

Trainer, accelerate and PEFT ask the model, not its weights. The methods of `_METHODS` are replaced
on the instance, as bound methods in its `__dict__`, so that deepcopy binds the copy's to the copy;
`experts.forward.clear_quantized` removes them.
"""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..checkpoint.save import save_pretrained
from ..detection.weight_reads import functions_run
from ..experts import checks, forward
from ..experts.forward import BOUND_METHODS, dequantize
from ..kernels.weights import PackedWeight
from ..layout import ModelLayout
from ..lora.inject import announce
from ..lora.stock_calls import add_adapter, load_adapter, named_modules
from ..packing import decoders, parametrize
from ..packing.settings import CodecSettings
from ..world import world


def finish_packing(
    model: nn.Module, layout: ModelLayout, config: Any, settings: CodecSettings
) -> set[str]:
    """Give a model whose experts are packed all that a bitsandbytes model has, and its forward.

    Return the names of the experts modules that the package's forward serves.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    modules = {entry.name: model.get_submodule(entry.name) for entry in layout.modules}
    packed = {name: {*parametrize.packed_names(module)} for name, module in modules.items()}
    names = [name for name, weights in packed.items() if weights]
    left = forward.activate(model, names)
    for name in names:
        weights, parts = packed[name], name.split(".")
        for end in range(1, len(parts)):
            owner = model.get_submodule(".".join(parts[:end]))
            if any(weights & {*function.__code__.co_names} for function in functions_run(owner)):
                parametrize.follow_calls_of(owner, ".".join(parts[end:]))
    host: Any = model
    host.is_loaded_in_8bit = settings.codec.loads_in_8bit
    host.is_loaded_in_4bit = not settings.codec.loads_in_8bit
    if getattr(host, "quantization_method", None) is None:
        host.quantization_method = QuantizationMethod.BITS_AND_BYTES
    host.is_quantized = True
    checks.install(model)
    announce(model)
    if isinstance(model, PreTrainedModel):
        if getattr(host, "hf_quantizer", None) is None:
            own = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
            host.hf_quantizer = own
            host.hf_quantizer.postprocess_model(model)
        bound = model.__dict__.setdefault(BOUND_METHODS, {})
        for name, function in _METHODS.items():
            if name not in model.__dict__:
                model.__dict__[name] = MethodType(function, model)
                bound[name] = function
    decoders.keep_layout(model)
    world().lay_out(model)
    return set(names) - set(left)


def get_memory_footprint(self: Any, return_buffers: bool = True) -> int:
    """Return the bytes of the model; statistics, which the stock method does not see, included."""
    total: int = type(self).get_memory_footprint(self, return_buffers=return_buffers)
    weights: dict[int, tuple[PackedWeight, Any]] = {}
    for module in self.modules():
        held: Any = module
        if parametrize.is_packed_linear(module) and decoders.has_codes(held):
            weights[id(held.weight)] = decoders.read_linear(held), held._modules.get("statistics")
        for name in parametrize.packed_names(module):
            packed, decoder = parametrize.read_packed(module, name), held.parametrizations[name][0]
            weights[id(packed.owner)] = packed, decoder
    for packed, decoder in weights.values():
        total += sum(tensor.nbytes for tensor in packed.statistics)
        if decoder is not None:  # counted with its padding, or not at all
            counted = (*decoder.parameters(), *(decoder.buffers() if return_buffers else ()))
            total -= sum(tensor.nbytes for tensor in counted)
    return total


# Replaced on the instance, because the stock ones know Linear layers only.
_METHODS: dict[str, Callable[..., Any]] = {
    "add_adapter": add_adapter,
    "dequantize": dequantize,
    "get_memory_footprint": get_memory_footprint,
    "load_adapter": load_adapter,
    "named_modules": named_modules,
    "save_pretrained": save_pretrained,
}
