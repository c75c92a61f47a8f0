"""Loading a saved adapter onto a model with packed experts."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.save_and_load import load_peft_weights
from torch import nn

from ..checkpoint.adapter import WEIGHTS, check_adapter_patterns, fused_adapter
from ..checkpoint.reader import read_header
from ..errors import AdapterError
from . import files
from .config import adapt, spell_exactly
from .files import check_folder, reading
from .model import connect_adapters, warn_untested, without_false_warning
from .names import base_model, packed_parameters, rewritten, warn_of_unpacked

_CREATION_KEYS = ("low_cpu_mem_usage", "autocast_adapter_dtype")
_EXPERT_KEY = re.compile(r"\.experts\.\d+\.")


def load_adapter(
    model: nn.Module,
    adapter: str | os.PathLike[str],
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    any_base: bool = False,
    unpacked_ok: bool = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """Load a saved adapter: `PeftModel.from_pretrained` for packed experts.

    Reads adapters that this package, or stock PEFT on the unpacked model, has saved, and those with
    LoRA for each single expert (transformers v4, Tinker, `export_adapter`). Files of adapters on
    experts carry no `lora_dropout`, which stock PEFT would refuse to load.

    Args:
        model: A model with packed experts, or a `PeftModel` of it, which gets one more adapter.
        adapter: The folder, or the repository id.
        adapter_name: Name of the adapter in the model.
        is_trainable: False freezes the adapter and puts the model in evaluation mode, as PEFT does.
        any_base: True allows a model that is not the one in the adapter's note.
        unpacked_ok: The model's experts are not packed on purpose, though the adapter's note says
            that it was trained on packed ones: no warning.
        **peft_kwargs: Passed on to `PeftModel.from_pretrained` or `PeftModel.load_adapter`.

    Raises:
        AdapterError: Tensors of the file have no place in the model, places got no tensor, or the
            adapter's note says that it was trained on another model: one that computes otherwise,
            or has other weights.
        CheckpointError: The folder is no adapter, or a file of it is missing or damaged.
        ConfigError: See `adapt_lora_config`.
    """
    warn_untested()
    adapter = os.fspath(adapter)
    if adapter_name in getattr(model, "peft_config", {}):
        raise AdapterError(
            f"adapter_name is {adapter_name!r}, which this model has already; give another."
        )
    base = base_model(model)
    hub = {key: peft_kwargs[key] for key in files.HUB_KEYS if key in peft_kwargs}
    check_folder(adapter, hub.get("subfolder"))
    on_disk = Path(adapter) / (hub.get("subfolder") or "")
    if on_disk.is_dir():
        check_adapter_patterns(on_disk, base)
    if not any_base:
        files.check_base(base, adapter, hub.get("subfolder"))
    if not unpacked_ok:
        warn_of_unpacked(base, on_disk, stacklevel=2)
    local = on_disk.is_dir() and not hub.get("subfolder")
    with fused_adapter(on_disk, base) if local else nullcontext(adapter) as fused:
        folder = os.fspath(fused)
        with reading(adapter):
            config = _read_config(base, folder, **hub)
        config.inference_mode = not is_trainable
        peft_model = _add_empty_adapter(model, adapter_name, adapt(base, config), peft_kwargs)
        if is_trainable:
            peft_model.set_requires_grad(adapter_name)
        renames = getattr(base, "_checkpoint_conversion_mapping", None)
        peft_kwargs.setdefault("key_mapping", renames)
        peft_kwargs |= {"called": adapter, "is_trainable": is_trainable}
        files.load_adapter(peft_model, folder, adapter_name, **peft_kwargs)
    return peft_model


def _read_config(base: nn.Module, adapter: str, **hub: Any) -> PeftConfig:
    config: PeftConfig = PeftConfig.from_pretrained(adapter, **hub)
    if isinstance(config, LoraConfig):
        path = Path(adapter) / (hub.get("subfolder") or "") / WEIGHTS
        local: Any = read_header(path) if path.exists() else None
        keys = local or load_peft_weights(adapter, device="cpu", **hub)
        if any(map(_EXPERT_KEY.search, keys)):  # single experts, as of transformers v4
            return rewritten(base, config) or config
    return config if packed_parameters(base) else spell_exactly(base, config)


def _add_empty_adapter(
    model: nn.Module, adapter_name: str, config: PeftConfig, options: dict[str, Any]
) -> Any:
    creation = {key: options[key] for key in _CREATION_KEYS if key in options}
    with without_false_warning(base_model(model), config):
        if isinstance(model, PeftModel):
            model.add_adapter(adapter_name, config, **creation)
            return model
        peft_model = peft.get_peft_model(model, config, adapter_name=adapter_name, **creation)
    return connect_adapters(peft_model)
