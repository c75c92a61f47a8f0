"""Checks a packed model before it runs: its codes must be intact and its adapters must have effect.

Stock PEFT skips packed parameters in silence, or wraps them in a layer that the experts forward
does not use. The hooks here raise at the first forward with adapters. They look at names and
attributes only, so that nothing of PEFT is imported.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError
from ..layout import unwrapped_name
from ..packing.decoders import Params4bit, cast_error
from ..packing.parametrize import iter_packed, load_linears
from ..world import CHECKED, world
from .forward_override import remove_liger
from .operands import known_record

_SEEN = "_moe_qlora_adapters_seen"
_HANDLE = "_moe_qlora_adapter_guard"
# By model: packed parameters that a cast could hit, and modules of packed experts. A copy has none.
_codes: MutableMapping[nn.Module, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()
_experts: MutableMapping[nn.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> None:
    """Check codes and adapters before each forward of `model`; does nothing a second time."""
    if _HANDLE in model.__dict__:
        return
    model.__dict__[_HANDLE] = (
        model.register_forward_pre_hook(_before_forward),
        model.register_load_state_dict_pre_hook(load_linears),
    )


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for watched in (_codes, _experts):
        watched.pop(model, None)
    for handle in model.__dict__.pop(_HANDLE, ()):
        handle.remove()
    model.__dict__.pop(CHECKED, None)
    model.__dict__.pop(_SEEN, None)


def _before_forward(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if model not in _experts:
        _experts[model] = [*map(weakref.ref, {module: 0 for _, module, _ in iter_packed(model)})]
    for module in (ref() for ref in _experts[model]):
        if module is not None:  # Compiled layers would find Liger's forward in their `__dict__`
            for each in (module, *getattr(known_record(module).lora, "wrappers", {}).values()):
                remove_liger(each)
    check_codes(model)
    world().before_forward(model)
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not configs:
        return
    seen = tuple((name, id(config)) for name, config in configs.items())
    if model.__dict__.get(_SEEN) != seen:  # adapters were added or removed
        check(model, configs)
        model.__dict__[_SEEN] = seen


def check_codes(model: nn.Module) -> None:
    """Raise where packed codes, of experts or Linear layers, were cast, which destroys them."""
    if model not in _codes:
        _codes[model] = [
            (name, weakref.ref(parameter))
            for name, parameter in model.named_parameters()
            if isinstance(parameter, Params4bit) and parameter.quant_storage.is_floating_point
        ]
    for name, ref in _codes[model]:
        codes = ref()
        if codes is None or codes.dtype == codes.quant_storage:
            continue
        # bitsandbytes converts Linear layers to another layout on some CPUs in evaluation
        if not getattr(codes.quant_state, "packing_format_for_cpu", False):
            path = unwrapped_name(name).replace("parametrizations.", "").removesuffix(".original")
            raise cast_error(path, codes.quant_storage, codes.dtype)


def check(model: nn.Module, configs: dict[str, Any]) -> None:
    """Raise where an adapter of `configs` (name -> PEFT config) has no effect on packed weights."""
    wrappers: dict[str, Any] = {
        f"{unwrapped_name(name)}.{module.parameter_name}": module
        for name, module in model.named_modules()
        if type(module).__name__ == "ParamWrapper"
    }
    packed = [
        f"{unwrapped_name(module)}.{name}".lstrip(".") for module, _, name in iter_packed(model)
    ]
    for adapter, config in configs.items():
        made_for = getattr(getattr(config, "_packed", None), "experts", ())
        for target in sorted(getattr(config, "target_parameters", None) or ()):
            if target in made_for and target not in packed and target not in wrappers:
                raise AdapterError(
                    f"LoRA adapter {adapter!r} on {target} was not created: its LoRA config was "
                    "adapted to another model, and this one has no such weight; call "
                    "moe_qlora.adapt_lora_config with this model and your own config."
                )
            for name in packed:
                if name != target and not name.endswith(f".{target}"):
                    continue
                wrapper = wrappers.get(name)
                if wrapper is None or adapter not in wrapper.lora_A:
                    what = "was not created"
                elif getattr(wrapper, "lora_source", None) is None:
                    what = "would have no effect"
                else:
                    continue
                raise AdapterError(
                    f"LoRA adapter {adapter!r} on {name} {what}: stock PEFT cannot adapt packed "
                    "experts by itself; use moe_qlora.get_peft_model (moe_qlora.load_adapter for a "
                    "saved adapter), or give stock PEFT the config from "
                    "moe_qlora.adapt_lora_config."
                )
