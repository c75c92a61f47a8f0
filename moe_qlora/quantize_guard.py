"""A last check before a packed model runs: no LoRA on its experts may be without effect.

Stock PEFT, given a config that this package has not adapted, finds no packed parameter under its
short name and goes on without, or wraps it in a layer that the experts forward never asks. Neither
raises. The hooks here do, when adapter weights are loaded into such layers, and at the first
forward after adapters were added. They ask by names and attributes alone, and so import nothing of
PEFT.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import AdapterError
from .experts import lora_provider
from .storage import iter_packed, packed_names

_SEEN = "_moe_qlora_adapters_seen"
_HANDLE = "_moe_qlora_adapter_guard"


def install(model: nn.Module) -> None:
    """Check adapters before each forward of `model`; does nothing where it does already."""
    if _HANDLE in model.__dict__:
        return
    model.__dict__[_HANDLE] = (
        model.register_forward_pre_hook(_before_forward),
        model.register_load_state_dict_pre_hook(_before_load),
    )


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for handle in model.__dict__.pop(_HANDLE, ()):
        handle.remove()
    model.__dict__.pop(_SEEN, None)


def _before_load(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Stop LoRA weights for packed experts that would go to layers without effect."""
    keys = (_plain(key.removeprefix(prefix)).partition(".lora_") for key in state_dict)
    owners = {owner for owner, lora, _ in keys if lora}
    if not owners:
        return
    for name, module, _ in iter_packed(model):
        if _plain(name) in owners and lora_provider(module) is None:
            raise AdapterError(_message("being loaded", _plain(name), "would have no effect"))


def _before_forward(model: nn.Module, args: Any) -> None:
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not configs or torch.compiler.is_compiling():
        return
    # a walk over the modules is for when adapters have come or gone
    seen = tuple((name, id(config)) for name, config in configs.items())
    if model.__dict__.get(_SEEN) != seen:
        check(model, configs)
        model.__dict__[_SEEN] = seen


def check(model: nn.Module, configs: dict[str, Any]) -> None:
    """Raise where one of these adapters (name -> PEFT config) targets a packed parameter in vain.

    Raises:
        AdapterError: LoRA on a packed parameter was not created, or by a layer without effect.
    """
    wrappers = {}
    for name, module in model.named_modules():
        parameter = getattr(module, "parameter_name", None)
        if type(module).__name__ == "ParamWrapper" and parameter in packed_names(_base(module)):
            wrappers[f"{_plain(name)}.{parameter}"] = module
    packed = [f"{_plain(module)}.{name}".lstrip(".") for module, _, name in iter_packed(model)]
    for adapter, config in configs.items():
        for target in getattr(config, "target_parameters", None) or ():
            for name in packed:
                if name != target and not name.endswith(f".{target}"):
                    continue
                wrapper: Any = wrappers.get(name)
                if wrapper is None or adapter not in wrapper.lora_A:
                    raise AdapterError(_message(repr(adapter), name, "was not created"))
                if getattr(wrapper, "provider", None) is None:
                    raise AdapterError(_message(repr(adapter), name, "would have no effect"))


def _message(adapter: str, name: str, what: str) -> str:
    return (
        f"LoRA adapter {adapter} on {name} {what}: stock PEFT cannot adapt packed experts by "
        "itself; use moe_qlora.get_peft_model (moe_qlora.load_adapter for a saved adapter), or "
        "give stock PEFT the config from moe_qlora.adapt_lora_config."
    )


def _base(module: nn.Module) -> nn.Module:
    while isinstance(inner := module._modules.get("base_layer"), nn.Module):
        module = inner
    return module


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")
