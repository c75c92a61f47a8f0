"""moe_qlora/lora/load.py: to be described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors import safe_open
from torch import nn

from ..errors import AdapterError
from . import targets
from .config import adapt, spell_exactly
from .model import upgrade_peft_model, without_false_warning

if TYPE_CHECKING:
    from torch import nn

from .model import _warn_untested

_HUB_KEYS = ("revision", "subfolder", "cache_dir", "token")
_CREATION_KEYS = ("low_cpu_mem_usage", "autocast_adapter_dtype")
_EXPERT_KEY = re.compile(r"\.experts\.\d+\.")


def load(
    model: nn.Module, adapter: str, adapter_name: str, *, is_trainable: bool, **kwargs: Any
) -> PeftModel:
    """See `moe_qlora.load_adapter`."""
    base = targets.base_model(model)
    if adapter_name in getattr(model, "peft_config", {}):
        raise AdapterError(
            f"adapter_name is {adapter_name!r}, which this model has already; give another."
        )
    hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
    creation = {key: kwargs[key] for key in _CREATION_KEYS if key in kwargs}
    config = PeftConfig.from_pretrained(adapter, **hub)
    config.inference_mode = not is_trainable
    if isinstance(config, LoraConfig) and _from_v4(adapter, **hub):
        config = targets.rewritten(base, config) or config
    elif not targets.packed_parameters(base):
        config = spell_exactly(base, config)
    config = adapt(base, config)
    kwargs.setdefault("key_mapping", getattr(base, "_checkpoint_conversion_mapping", None))
    with without_false_warning(config):
        wrapped: Any = model
        if isinstance(model, PeftModel):
            wrapped.add_adapter(adapter_name, config, **creation)
        else:
            wrapped = peft.get_peft_model(model, config, adapter_name=adapter_name, **creation)
            if targets.packed_parameters(base):
                upgrade_peft_model(wrapped)
    if is_trainable:
        wrapped.set_requires_grad(adapter_name)
    try:
        result = wrapped.load_adapter(adapter, adapter_name, is_trainable=is_trainable, **kwargs)
    except RuntimeError as error:  # torch's list of all that has another shape
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise AdapterError(
            f"{adapter} does not fit this model: {first.rstrip('.')}; load it on the model that it "
            "was trained on."
        ) from error
    if (result.missing_keys or result.unexpected_keys) and not _load_as_named(
        wrapped, adapter, adapter_name, **hub
    ):
        raise AdapterError(_load_fault(adapter, result.missing_keys, result.unexpected_keys))
    return wrapped


def _load_as_named(model: PeftModel, adapter: str, adapter_name: str, **hub: Any) -> bool:
    """Load a file whose names are all the model's own; False, and nothing done, where one is not.

    For some model types (mistral_large4, deepseek_ocr2) PEFT 0.21 takes every name in the file for
    one of the published checkpoint and renames it, those that it wrote itself included.
    """
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights

    given = load_peft_weights(adapter, device="cpu", **hub)
    places = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    if places.keys() != given.keys() or any(
        place.is_meta or place.shape != given[key].shape for key, place in places.items()
    ):
        return False
    with torch.no_grad():
        for key, place in places.items():
            place.copy_(given[key])
    return True


def _load_fault(adapter: str, missing: list[str], unexpected: list[str]) -> str:
    names, what = (
        (unexpected, "has no place in this model")
        if unexpected
        else (missing, "is not in the file")
    )
    return (
        f"{adapter} does not fit this model: {names[0]} {what} ({len(unexpected)} tensors have no "
        f"place, "
        f"{len(missing)} places got none); load it on the model that it was trained on."
    )


def _from_v4(adapter: str, **hub: Any) -> bool:
    """Whether the file holds one LoRA for each single expert, as transformers v4 had them."""
    from peft.utils.save_and_load import load_peft_weights

    path = Path(adapter) / (hub.get("subfolder") or "") / "adapter_model.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
        return any(_EXPERT_KEY.search(key) for key in keys)
    return any(_EXPERT_KEY.search(key) for key in load_peft_weights(adapter, device="cpu", **hub))


def load_adapter(
    model: nn.Module,
    adapter: str,
    adapter_name: str = "default",
    *,
    is_trainable: bool = False,
    **peft_kwargs: Any,
) -> PeftModel:
    """Load a saved adapter: `PeftModel.from_pretrained` for packed experts.

    Reads adapters that this package, or stock PEFT on the unpacked model, has saved, those from
    transformers v4 with one LoRA for each expert included. Files of adapters on experts carry no
    `lora_dropout`, which stock PEFT would refuse to load.

    Args:
        model: A model with packed experts, or a `PeftModel` of it, which gets one more adapter.
        adapter: The folder, or the repository id.
        adapter_name: Name of the adapter in the model.
        is_trainable: False freezes the adapter and puts the model in evaluation mode, as PEFT does.
        **peft_kwargs: Passed on to `PeftModel.from_pretrained` or `PeftModel.load_adapter`.

    Raises:
        AdapterError: tensors of the file have no place in the model, or places got no tensor.
        ConfigError: see `adapt_lora_config`.
    """
    _warn_untested()
    return load(model, adapter, adapter_name, is_trainable=is_trainable, **peft_kwargs)


__all__ = [
    "load_adapter",
]
