"""bitsandbytes' stock Linear layers as packed weights: reads and writes them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ..errors import ConfigError
from ..kernels.weights import PackedWeight
from .codecs import CODES
from .decoders import bnb, from_quant_state, params4bit, read, to_quant_state
from .int8 import INT8, SCALES
from .settings import CodecSettings


def read_linear(layer: Any) -> PackedWeight:
    """Return the packed weight of one of bitsandbytes' Linear layers; copies no codes."""
    if "statistics" in layer._modules:  # as engines shard it, perhaps sharded
        return read(layer.weight, layer.statistics)
    if isinstance(layer, bnb.Linear8bitLt):
        weight, state = layer.weight, layer.state
        codes = state.CB if weight.CB is None else weight.CB
        scales = state.SCB if weight.SCB is None else weight.SCB
        tensors, shape = {CODES: codes, SCALES: scales}, tuple(codes.shape)
        packed = INT8.assemble(tensors, shape, torch.float16, CodecSettings(INT8.kind))
        return replace(packed, owner=weight)
    codes, state = layer.weight.data, layer.weight.quant_state
    if _is_converted(layer):
        import bitsandbytes.nn.modules as bnb_modules

        absmax, state = state.absmax, copy.copy(state)  # the inverse changes it in place
        codes, state = bnb_modules._convert_weight_packed_for_cpu_inverse(codes, state)
        if not state.nested:  # and leaves absmax in the columns' order
            state.absmax = absmax.T.reshape(-1).float()
    return replace(from_quant_state(codes, state), owner=layer.weight)


def has_codes(layer: Any) -> bool:
    """Whether one of bitsandbytes' Linear layers is packed by now."""
    if "statistics" in layer._modules:
        return True
    if isinstance(layer, bnb.Linear4bit):
        return getattr(layer.weight, "quant_state", None) is not None
    return not getattr(layer.weight, "CB", None) is layer.state.CB is None


def check_linears(model: nn.Module, settings: CodecSettings) -> None:
    """Raise where bitsandbytes would pack a model's Linear layers by a codec it does not know."""
    layers = (name for name, one in model.named_modules() if isinstance(one, bnb.Linear4bit))
    if not settings.codec.packs_linears and (name := next(layers, None)) is not None:
        raise ConfigError(
            f"{name} would be packed by bitsandbytes, which does not know "
            f"bnb_4bit_quant_type={settings.kind!r}: name it, and all other Linear layers, in "
            "llm_int8_skip_modules."
        )


def linear_kind(layer: Any) -> str:
    """Return the packed type of a bitsandbytes Linear layer, also before it is packed."""
    if isinstance(layer, bnb.Linear8bitLt):
        return INT8.kind
    if "statistics" in layer._modules:
        return str(layer.statistics.kind)
    state = getattr(layer.weight, "quant_state", None)
    return str((layer.weight if state is None else state).quant_type)


def keep_layout(model: nn.Module) -> None:
    """Stop bitsandbytes' 4-bit Linear layers from converting their codes on CPUs, in place.

    bitsandbytes 0.50 does so in evaluation with AVX512-BF16; such a layer computes in bf16, passes
    no gradient, also in later training, and has its absmax rounded to bf16 and reordered.
    """
    for module in model.modules():
        if isinstance(module, bnb.Linear4bit):
            layer: Any = module
            if _is_converted(layer):
                write_linear(layer, read_linear(layer))
            layer.support_avx512bf16_for_cpu = False


def _is_converted(layer: Any) -> bool:
    state = getattr(layer.weight, "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def write_linear(layer: Any, packed: PackedWeight) -> None:
    """Set the packed weight of a stock bitsandbytes Linear layer, as a load does."""
    if isinstance(layer, bnb.Linear8bitLt):
        codes, scales = packed.codes, packed.absmax
        layer.weight = bnb.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
        layer.state.CB = layer.state.SCB = None
        return
    layer.weight = params4bit(packed.codes, to_quant_state(packed))
    layer.weight.module, layer.quant_state = layer, layer.weight.quant_state


def restore_linear(module: nn.Module) -> None:
    """Make a gathered Linear layer that engines can shard bitsandbytes' own again, for PEFT."""
    if hasattr(type(module), "restore_stock"):
        cast(Any, module).restore_stock()
