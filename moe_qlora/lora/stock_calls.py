"""Makes stock PEFT's own calls on a packed model right, by methods bound to the model.

`PeftModel.from_pretrained(model, folder)` and `peft.get_peft_model(model, config)` use the config
as it is, with the names that expert parameters have on unpacked models, and call no hook with it.
But before PEFT's tuner reads the config, it walks the model's modules. The `named_modules` here,
which `hf/model.py` binds to the model, uses that call: it looks for the tuner among its callers,
adapts the config, and gives the tuner this package's class.

PEFT is not patched. Should PEFT walk the model at another point, the tuner is not found, and
adapters without effect are refused when they are loaded, or at the first forward
(experts/checks.py).

transformers' own `add_adapter` and `load_adapter` also pass PEFT the folder's config as it is; the
two methods of these names, which `hf/model.py` binds to the model, adapt it first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraModel as StockLoraModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ..checkpoint.adapter import CONFIG, LoraSettings, check_config_patterns
from ..checkpoint.reader import parse_fields
from ..world import world
from .config import AdaptedLoraConfig, adapt, adapt_lora_config
from .files import check_base, check_folder, misfit, reading, use_own_files
from .model import LoraModel, warn_untested
from .names import (
    changed,
    check_adapter_names,
    is_all_linear,
    packed_parameters,
    reached_modules,
    rewritten,
)
from .targets import resolve_targets

# Stack frames in between: PEFT, transformers' `get_model_conversion_mapping`, `named_modules`;
# and from a tuner's `inject_adapter` up to `PeftModel.from_pretrained`.
_NEAR, _FAR = 3, 8


def named_modules(
    self: Any, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Return what `nn.Module.named_modules` does; adapt a tuner that calls it (see above)."""
    if memo is None and not prefix and not torch.compiler.is_compiling():
        frame = _caller(sys._getframe(1), BaseTuner.inject_adapter.__code__, _NEAR)
        if frame is not None and frame.f_locals["model"] is self:
            _take_over(frame.f_locals["model"], frame)
    walk: Iterator[tuple[str, nn.Module]] = type(self).named_modules(
        self, memo, prefix, remove_duplicate
    )
    return walk


def _take_over(model: nn.Module, frame: FrameType) -> None:
    values = frame.f_locals
    tuner, name = values["self"], values["adapter_name"]
    config = tuner.peft_config[name]
    if (
        type(tuner) is not StockLoraModel
        or "peft_config" in values  # PEFT has read it
        or values.get("state_dict") is not None
        or not isinstance(config, LoraConfig)
        or not packed_parameters(model)
    ):
        return
    warn_untested()
    tuner.__class__ = LoraModel
    if not isinstance(config, AdaptedLoraConfig):
        load = _caller(frame, PeftModel.from_pretrained.__func__.__code__, _FAR)
        if load is not None:  # untrusted input
            file = Path(load.f_locals["model_id"]) / CONFIG
            parse_fields(LoraSettings, vars(config), file)
            check_config_patterns(vars(config), model, str(file))
            named = config.target_modules and not config.target_parameters
            if named and not is_all_linear(config):
                probe = changed(config, exclude_modules=resolve_targets(model).excludes)
                if not reached_modules(model, probe):  # of transformers v4, on experts alone
                    config = rewritten(model, config) or config
        config = adapt(model, config, warn=load is None and not config.inference_mode)
        tuner.peft_config[name] = config
    world().prepare_adapters(model, config)
    made = _caller(frame, PeftModel.__init__.__code__, _FAR)
    if made is not None:
        use_own_files(made.f_locals["self"])


def _caller(frame: FrameType | None, code: CodeType, most: int) -> FrameType | None:
    for _ in range(most):
        if frame is None or frame.f_code is code:
            return frame
        frame = frame.f_back
    return None


def add_adapter(self: Any, adapter_config: Any, adapter_name: str | None = None) -> None:
    """Add an adapter as `PreTrainedModel.add_adapter` does, LoRA on packed experts included."""
    _check_name(self, adapter_name)
    type(self).add_adapter(self, adapt_lora_config(self, adapter_config), adapter_name)


def load_adapter(
    self: Any,
    peft_model_id: str | None = None,
    adapter_name: str | None = None,
    peft_config: Any = None,
    *args: Any,
    adapter_kwargs: dict[str, Any] | None = None,
    load_config: Any = None,
    **kwargs: Any,
) -> Any:
    """Load an adapter as `PreTrainedModel.load_adapter` does, LoRA on packed experts included."""
    _check_name(self, adapter_name)
    if peft_config is None and peft_model_id is not None:
        # transformers uses these only where it is given no config.
        download = load_config.download_kwargs if load_config is not None else {}
        download = {**download, **kwargs.get("download_kwargs", {}), **(adapter_kwargs or {})}
        kwargs["download_kwargs"] = download
        check_folder(peft_model_id, download.get("subfolder"))
        with reading(peft_model_id):
            peft_config = PeftConfig.from_pretrained(peft_model_id, **download)
    if peft_model_id is not None:
        check_base(self, peft_model_id, kwargs.get("download_kwargs", {}).get("subfolder"))
    if peft_config is not None:
        peft_config = adapt(self, peft_config)
    info = type(self).load_adapter(
        self,
        peft_model_id,
        adapter_name,
        peft_config,
        *args,
        adapter_kwargs=adapter_kwargs,
        load_config=load_config,
        **kwargs,
    )
    # transformers lists other adapters' tensors as missing too.
    own = re.compile(rf"\.{re.escape(adapter_name or 'default')}(\.|$)")
    missing = sorted(name for name in info.missing_keys if own.search(name))
    unexpected = sorted(info.unexpected_keys)
    if missing or unexpected:
        advice = ", and one from transformers v4 with moe_qlora.load_adapter"
        raise misfit(peft_model_id, missing, unexpected, advice)
    return info


def _check_name(model: Any, adapter_name: str | None) -> None:
    check_adapter_names(model, {*getattr(model, "peft_config", ()), adapter_name or "default"})
