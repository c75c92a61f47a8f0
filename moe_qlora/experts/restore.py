"""Turns packed experts back into plain parameters, and their model into an unquantized one."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from ..packing import parametrize
from ..packing.codec import unpack
from . import checks

BOUND_METHODS = "_moe_qlora_methods"
"""Entry of a model's `__dict__`: the functions by name that were bound to this instance."""


def clear_quantized(model: nn.Module) -> None:
    """Undo `mark_quantized` where no expert is packed any more, such as after a merge.

    A model that still has bitsandbytes Linear layers goes on as what it was loaded as.
    """
    from . import forward

    if next(parametrize.iter_packed(model), None) is not None:
        return
    forward.deactivate(model)
    checks.remove(model)
    for name, function in model.__dict__.pop(BOUND_METHODS, {}).items():
        method = model.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is function:
            del model.__dict__[name]
    host: Any = model
    if getattr(host, "hf_quantizer", None) is not None and not _has_packed_linears(model):
        host.hf_quantizer.remove_quantization_config(model)
        host.is_loaded_in_4bit = host.is_loaded_in_8bit = False


def _has_packed_linears(model: nn.Module) -> bool:
    return any(map(parametrize.is_packed_linear, model.modules()))


def dequantize(self: Any, dtype: torch.dtype | None = None) -> Any:
    """Decode experts and Linear layers of a model in place and return it, no longer quantized.

    Without a dtype each expert weight gets its own, and Linear layers the model's.
    """
    plain: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for _, module, name in list(parametrize.iter_packed(self)):
        key = id(parametrize.original_of(module, name))
        if key not in plain:
            weight = unpack(parametrize.read_packed(module, name))
            plain[key] = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
        parametrize.detach(module, name, plain[key])
    clear_quantized(self)
    # The stock method cannot do without at least one such layer.
    if _has_packed_linears(self):
        type(self).dequantize(self, dtype=dtype)
    self.is_loaded_in_4bit = self.is_loaded_in_8bit = False
    return self
