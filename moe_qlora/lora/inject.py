"""Puts wrappers for packed experts into a model that PEFT walks, and says what got LoRA.

wrap_parameter       makes one wrapper, where it would be on the unpacked model
announce             logs one line as training starts: what is packed, what that saves, what LoRA
                     covers; as a warning, which is seen without any settings, at the first
                     training forward, so that it comes once, whichever program made the adapters
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import distributed, nn

from ..errors import ConfigError
from ..layout import human_bytes, listed, unwrapped, unwrapped_name
from ..packing.parametrize import iter_packed, original_of, packed_names, read_packed
from ..packing.settings import CodecSettings, packed_nbytes
from .layer import ExpertAdapters, ParamWrapper
from .targets import base_model, packed_parameters

_LOG = logging.getLogger(__name__)
_HANDLE = "_moe_qlora_announcement"


def wrap_parameter(
    target: nn.Module,
    adapter_name: str,
    config: LoraConfig,
    parameter_name: str | None = None,
    **kwargs: Any,
) -> nn.Module | None:
    """Wrap one parameter of `target`, which may be wrapped already; None leaves it to PEFT.

    PEFT wraps in alphabetical order; here the parameter that was registered first is innermost.
    """
    base, name = unwrapped(target), kwargs.get("target_name")
    adapted_to = getattr(getattr(config, "_packed", None), "experts", ())
    if name in adapted_to and parameter_name not in packed_names(base):
        raise ConfigError(
            f"{name} is not packed, and this LoRA config was adapted to a model whose experts are: "
            "call moe_qlora.enable() before the trainer loads the model, and give the trainer the "
            "quantization_config that adapt_lora_config got."
        )
    if parameter_name is None or not packed_names(base):
        return None
    order = [*packed_names(base), *(name for name, _ in base.named_parameters(recurse=False))]
    outer: ParamWrapper | None = None
    inner, source = target, None
    while isinstance(inner, ParamWrapper):
        source = inner.lora_source
        if order.index(inner.parameter_name) < order.index(parameter_name):
            break
        outer, inner = inner, inner.base_layer
    wrapper = ParamWrapper(inner, adapter_name, parameter_name, config=config, **kwargs)
    wrapper.connect(source or ExpertAdapters())
    if outer is None:
        return wrapper
    outer.base_layer = wrapper
    return target


def coverage(model: nn.Module, adapter: str) -> str:
    """Return one sentence on the layers and expert weights that an adapter is on.

    `model` is a `PeftModel` or the model inside it.
    """
    experts = packed_parameters(model)
    adapted: dict[str, list[str]] = {"layers": [], "expert weights": [], "other parameters": []}
    for path, layer in base_model(model).named_modules():
        factors = getattr(layer, "adapter_layer_names", ())
        if isinstance(layer, BaseTunerLayer) and any(adapter in getattr(layer, f) for f in factors):
            name, kind = unwrapped_name(path), "layers"
            if isinstance(layer, StockParamWrapper):
                name = f"{name}.{layer.parameter_name}"
                kind = "expert weights" if name in experts else "other parameters"
            adapted[kind].append(name)
    parts = []
    for kind, names in adapted.items():
        leaves = listed(sorted({name.rpartition(".")[2] for name in names}), most=8)
        of = f" of {len(experts)}" if kind == "expert weights" else ""
        if names or (of and experts):
            parts.append(f"{len(names)}{of} {kind}" + (f" ({leaves})" if names else ""))
    host: Any = model
    trained, total = PeftModel.get_nb_trainable_parameters(host)
    config: Any = host.peft_config[adapter]
    kind = "LoRA" if config.peft_type == "LORA" else config.peft_type.value
    share = 100 * trained / max(total, 1)
    where = " and ".join(parts) or "no layer"
    return f"{kind} on {where}: {trained:,} weights ({share:.2g} %) are trained"


def announce(model: nn.Module) -> None:
    """Log the line at the first forward of `model` in training; does nothing a second time."""
    if _HANDLE not in model.__dict__:
        model.__dict__[_HANDLE] = model.register_forward_pre_hook(_before_forward)


def _before_forward(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    model.__dict__.pop(_HANDLE).remove()
    alone = not distributed.is_available() or not distributed.is_initialized()
    if (alone or distributed.get_rank() == 0) and (text := summary(model)):
        _LOG.warning("%s", text)


def summary(model: nn.Module) -> str:
    """Return the line for a model in training; "" where no expert is packed."""
    owners, codecs = set(), set()
    sizes: dict[int, tuple[int, int]] = {}  # tied weights count once
    for name, module, leaf in iter_packed(model):
        packed = read_packed(module, leaf)
        settings = CodecSettings.of(packed)
        owners.add(name)
        codecs.add(settings.describe())
        numel = torch.Size(packed.shape).numel()
        sizes[id(original_of(module, leaf))] = (
            numel * packed.dtype.itemsize,
            packed_nbytes(tuple(packed.shape), settings),
        )
    if not sizes:
        return ""
    before, after = (human_bytes(sum(column)) for column in zip(*sizes.values(), strict=True))
    layers = f"{len(owners)} layer{'s' if len(owners) > 1 else ''}"
    codec = ", ".join(sorted(codecs))
    text = f"The experts of {layers} are packed ({codec}): {after} instead of {before}."
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for adapter in getattr(model, "peft_config", None) or ():
        if any(f".{adapter}." in name or name.endswith(f".{adapter}") for name in trained):
            text += f" {coverage(model, adapter)}."
    return text
