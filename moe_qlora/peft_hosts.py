"""Adapters whose `LoraConfig` a host has made itself, from the lists of an adapted one."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from . import lora
from .peft_config import AdaptedLoraConfig

# PEFT narrows target_modules to what it has found, so that these cannot be compared.
_LISTS = ("target_parameters", "exclude_modules")


def take_after(model: PeftModel, adapted: PeftConfig) -> None:
    """Let every adapter of `model` that was made from `adapted`'s lists be as if made with it.

    Its file then says what the caller asked for, with the note that a merge reads, and its layers
    have the dropout that PEFT's own layer for parameters refuses, which a host leaves at 0.

    Args:
        model: Connected already.
        adapted: From `adapt_lora_config`; where it is no LoRA config nothing happens.
    """
    if not isinstance(adapted, AdaptedLoraConfig):
        return
    for name, config in model.peft_config.items():
        if type(config) is not LoraConfig or not _made_from(config, adapted):
            continue
        config.__class__ = AdaptedLoraConfig
        config._edits = adapted._edits
        config._reload_note, config._packed = adapted._reload_note, adapted._packed
        if adapted.lora_dropout != config.lora_dropout:
            set_dropout(model, name, adapted.lora_dropout)


def _made_from(config: Any, adapted: Any) -> bool:
    return all(_names(getattr(config, one)) == _names(getattr(adapted, one)) for one in _LISTS)


def _names(value: Any) -> Any:
    return value if isinstance(value, str) else frozenset(value or ())


def set_dropout(model: PeftModel, adapter: str, probability: float) -> None:
    """Give every layer of an adapter this dropout; PEFT sets it as it makes a layer."""
    model.peft_config[adapter].lora_dropout = probability
    for module in model.modules():
        if isinstance(module, lora.ParamWrapper):
            if adapter in module.lora_A:
                module._set_dropout(adapter, probability)
        elif isinstance(module, LoraLayer) and adapter in module.lora_dropout:
            module.lora_dropout[adapter] = nn.Dropout(p=probability)
