"""One line, logged at the first training forward: packed experts, bytes, layers with LoRA."""

import logging
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..layout import base_model, human_bytes, listed, unwrapped_name
from ..packing.parametrize import iter_packed, original_of, read_packed
from ..packing.settings import CodecSettings, packed_nbytes
from ..world import world
from .packed_rows import SEPARATES
from .targets import packed_parameters

_LOG = logging.getLogger(__name__)
_HANDLE = "_moe_qlora_announcement"


def coverage(model: nn.Module, adapter: str) -> str:
    """Return one sentence on the layers and expert weights with an adapter."""
    host: Any = model
    experts, layers, weights = packed_parameters(model), list[str](), list[str]()
    for path, layer in base_model(model).named_modules():
        factors = getattr(layer, "adapter_layer_names", ())
        if isinstance(layer, BaseTunerLayer) and any(adapter in getattr(layer, f) for f in factors):
            name = unwrapped_name(path)
            parameter = f"{name}.{getattr(layer, 'parameter_name', '')}"
            weights.append(parameter) if parameter in experts else layers.append(name)
    counts = {"layers": layers, f"of {len(experts)} expert weights": weights}
    parts = []
    for kind, names in counts.items():
        leaves = listed(sorted({name.rpartition(".")[2] for name in names}), most=8)
        if names or kind != "layers":
            parts.append(f"{len(names)} {kind}" + (f" ({leaves})" if names else ""))
    trained, everything = PeftModel.get_nb_trainable_parameters(host)
    peft_type = host.peft_config[adapter].peft_type
    return (
        f"{'LoRA' if peft_type == 'LORA' else peft_type.value} on "
        f"{' and '.join(parts) or 'no layer'}: "
        f"{trained:,} weights ({100 * trained / max(everything, 1):.2g} %) are trained"
    )


def announce(model: nn.Module) -> None:
    """Log the line at the first forward of `model` in training; does nothing a second time."""
    if _HANDLE not in model.__dict__:
        # Read now: in a forward under ZeRO-3 a read gathers, for which other ranks would wait.
        hook = partial(_before_forward, _experts(model))
        model.__dict__[_HANDLE] = model.register_forward_pre_hook(hook)


def _before_forward(experts: str, model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    model.__dict__.pop(_HANDLE).remove()
    if not (experts and world().is_first() and any(iter_packed(model))):
        return
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for adapter in getattr(model, "peft_config", None) or ():
        if any(f".{adapter}." in name or name.endswith(f".{adapter}") for name in trained):
            experts += f" {coverage(model, adapter)}."
    if next(model.parameters()).is_cuda and not any(SEPARATES in vars(m) for m in model.modules()):
        experts += " moe_qlora.prepare_training(model, batch_size=..., seq_len=...) speeds it up."
    _LOG.warning("%s", experts)


def _experts(model: nn.Module) -> str:
    """Return one sentence on packed experts and their bytes; "" where none is packed."""
    owners, codecs = set(), set()
    sizes: dict[int, tuple[int, int]] = {}  # tied weights count once
    for name, module, leaf in iter_packed(model):
        packed = read_packed(module, leaf)
        settings = CodecSettings.of(packed)
        owners.add(name)
        codecs.add(settings.describe())
        sizes[id(original_of(module, leaf))] = (
            packed.numel * packed.dtype.itemsize,
            packed_nbytes(tuple(packed.shape), settings),
        )
    if not sizes:
        return ""
    before, after = (human_bytes(sum(column)) for column in zip(*sizes.values(), strict=True))
    layers = f"{len(owners)} layer{'s' if len(owners) > 1 else ''}"
    codec = ", ".join(sorted(codecs))
    return f"The experts of {layers} are packed ({codec}): {after} instead of {before}."
