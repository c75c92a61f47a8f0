"""What got LoRA, in one line for the log.

A second line comes as training starts: what is packed, what that saves, and what LoRA covers. It is
logged as a warning, the level that is seen without any settings, from the first forward in which a
packed model is trained; so it comes once, whichever program has made the adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import distributed, nn

from ..layout import human_bytes, listed, unwrapped_name
from ..packing.format import packed_nbytes
from ..packing.parametrize import iter_packed, original_of, read_packed
from ..packing.settings import CodecSettings
from .names import base_model, packed_parameters

_LOG = logging.getLogger(__name__)
_HANDLE = "_moe_qlora_announcement"


def log_coverage(model: PeftModel, adapter: str, unpacked: Collection[str] = ()) -> None:
    """Log which layers and expert weights an adapter is on, and the share of weights it trains.

    `unpacked` are the model's expert weights where they are not packed.
    """
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s", coverage(model, adapter, unpacked))


def coverage(model: nn.Module, adapter: str, unpacked: Collection[str] = ()) -> str:
    """Return the sentence that `log_coverage` logs, of a `PeftModel` or the model inside it."""
    experts = {*packed_parameters(model), *unpacked}
    adapted: dict[str, list[str]] = {"layers": [], "expert weights": [], "other parameters": []}
    for path, module in base_model(model).named_modules():
        if not isinstance(module, BaseTunerLayer) or not _has(module, adapter):
            continue
        name = unwrapped_name(path)
        if isinstance(module, ParamWrapper):
            name = f"{name}.{module.parameter_name}"
            adapted["expert weights" if name in experts else "other parameters"].append(name)
        else:
            adapted["layers"].append(name)
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


def _has(module: nn.Module, adapter: str) -> bool:
    layer: Any = module
    return any(adapter in getattr(module, name) for name in layer.adapter_layer_names)


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
