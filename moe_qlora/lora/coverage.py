"""What got LoRA, in one line for the log."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..layout import listed, unwrapped_name
from .names import base_model, packed_parameters

_LOG = logging.getLogger(__name__)


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
