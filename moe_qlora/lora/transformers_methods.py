"""transformers' own adapter methods, for a model with packed experts.

transformers hands PEFT the config as it lies in the folder, which names expert parameters as they
are on unpacked models; the two methods here, which `hf/model.py` binds to the model, adapt it to
the packed ones first. Everything else is transformers'.
"""

from __future__ import annotations

import re
from typing import Any

from peft import PeftConfig

from .config import adapt, adapt_lora_config
from .fill import check_base, misfit
from .folder import check_folder, reading
from .names import check_adapter_names


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
        # transformers looks these up only where it is given no config.
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
