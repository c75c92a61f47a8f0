"""Makes stock PEFT's and transformers' own calls on a packed model right, by bound methods.

`PeftModel.from_pretrained(model, folder)`, `peft.get_peft_model(model, config)` and transformers'
`add_adapter` and `load_adapter` use the config as it is, and hand it to nothing of the model; but
before PEFT's tuner reads it, it walks the model's modules. The `named_modules` here, bound to the
model by `hf/model.py`, looks for the tuner among its callers, adapts the config, and gives the
tuner this package's class. If it finds none, adapters without effect are refused (checks.py).
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.adapter import CONFIG, LoraSettings
from ..checkpoint.folder import parse_fields
from ..world import world
from . import targets
from .config import AdaptedLoraConfig, adapt, adapt_lora_config
from .files import check_adapter, check_fits, use_own_files
from .model import LoraModel

# Stack frames in between: PEFT, transformers' `get_model_conversion_mapping`, `named_modules`;
# and from a tuner's `inject_adapter` up to `PeftModel.from_pretrained`.
_NEAR, _FAR = 3, 8


def named_modules(
    self: Any, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Walk as `nn.Module.named_modules` does, and adapt a tuner that calls it (see above)."""
    if memo is None and not prefix and not torch.compiler.is_compiling():
        frame = _caller(sys._getframe(1), _NEAR, BaseTuner.inject_adapter.__code__)
        if frame is not None and frame.f_locals["model"] is self:
            _take_over(self, frame)
    return type(self).named_modules(self, memo, prefix, remove_duplicate)


def _take_over(model: nn.Module, frame: FrameType) -> None:
    values = frame.f_locals
    tuner, name = values["self"], values["adapter_name"]
    config = tuner.peft_config[name]
    if (
        isinstance(tuner, LoraModel)
        or "peft_config" in values  # PEFT has read it
        or values.get("state_dict") is not None
        or not hasattr(config, "exclude_modules")
        or not targets.packed_parameters(model)
    ):
        return
    targets.check_adapter_names(model, {*getattr(model, "peft_config", ()), name})
    loads = PeftModel.from_pretrained.__func__.__code__, PreTrainedModel.load_adapter.__code__
    load = _caller(frame, _FAR, *loads)
    if not isinstance(config, AdaptedLoraConfig):
        if load is not None and targets.is_lora(config):  # untrusted input
            folder = load.f_locals.get("model_id") or load.f_locals.get("peft_model_id")
            parse_fields(LoraSettings, vars(config), Path(folder or "") / CONFIG)
            named = config.target_modules and not config.target_parameters
            probe = targets.changed(config, exclude_modules=targets.exclude_modules(model))
            named = named and not targets.is_all_linear(config)
            if named and not targets.reached_modules(model, probe):
                # of transformers v4, on experts alone
                config = targets.rewritten(model, config) or config
        config = adapt(model, config, warn=load is None and not config.inference_mode)
        tuner.peft_config[name] = config
    if type(tuner) is not StockLoraModel:
        return
    tuner.__class__ = LoraModel
    world().prepare_adapters(model, config)
    made = _caller(frame, _FAR, PeftModel.__init__.__code__)
    if made is not None:
        use_own_files(made.f_locals["self"])


def _caller(frame: FrameType | None, most: int, *codes: CodeType) -> FrameType | None:
    for _ in range(most):
        if frame is None or frame.f_code in codes:
            return frame
        frame = frame.f_back
    return None


def add_adapter(self: Any, adapter_config: Any, adapter_name: str | None = None) -> None:
    """Add an adapter as `PreTrainedModel.add_adapter` does, with a copy of the config."""
    type(self).add_adapter(self, adapt_lora_config(self, adapter_config), adapter_name)


def load_adapter(
    self: Any, peft_model_id: Any = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Load an adapter as `PreTrainedModel.load_adapter` does, and check that it fits."""
    if peft_model_id is not None:
        options = (kwargs.get("adapter_kwargs"), kwargs.get("download_kwargs"))
        subfolder = next((o["subfolder"] for o in options if o and "subfolder" in o), None)
        check_adapter(peft_model_id, self, subfolder)
    info = type(self).load_adapter(self, peft_model_id, adapter_name, *args, **kwargs)
    # transformers lists other adapters' tensors as missing too.
    own = re.compile(rf"\.{re.escape(adapter_name or 'default')}(\.|$)")
    missing = sorted(name for name in info.missing_keys if own.search(name))
    check_fits(peft_model_id, missing, sorted(info.unexpected_keys))
    return info
