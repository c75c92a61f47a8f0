"""Checks a packed model before it runs: its codes must be intact and its adapters must have effect.

Stock PEFT, given a config that this package has not adapted, finds no packed parameter under its
short name and skips it, or wraps it in a layer that the experts forward does not use. Neither
raises. The hooks here do: when adapter weights are loaded into such layers, and at the first
forward after adapters were added. They look at names and attributes only, so that nothing of PEFT
is imported.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..errors import AdapterError, QuantizationError
from ..layout import unwrapped_name
from ..packing.decoders import Params4bit
from ..packing.parametrize import iter_packed, load_linears
from ..world import CHECKED, world
from .forward_override import remove_liger
from .operands import lora_source

_SEEN = "_moe_qlora_adapters_seen"
_HANDLE = "_moe_qlora_adapter_guard"
_WATCH = "_moe_qlora_codes_watched"


class _Watch:
    """A model's packed parameters that a cast could hit, by name, and its packed experts modules.

    Collected anew for the model's copy, which `copy` and `pickle` make before they come here.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.codes: tuple[tuple[str, weakref.ref[Any]], ...] | None = None
        self.experts: tuple[weakref.ref[nn.Module], ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        model: Any = self.model()
        return type(self)(memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return type(self), (self.model(),)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def override_forwards(self) -> None:
        """Remove the forwards that Liger has bound to packed experts, also while tracing a graph.

        torch.compile runs this untraced, before it reaches the experts. It is a method without
        arguments because torch 2.11 allows no module as an argument of such a function.
        """
        model = self.model()
        if self.experts is None and model is not None:
            self.experts = tuple(
                weakref.ref(module)
                for module in dict.fromkeys(module for _, module, _ in iter_packed(model))
            )
        for ref in self.experts or ():
            module: Any = ref()
            if module is None:
                continue
            remove_liger(module)
            for wrapper in getattr(lora_source(module), "wrappers", {}).values():
                remove_liger(wrapper)


def install(model: nn.Module) -> None:
    """Check codes and adapters before each forward of `model`; does nothing a second time."""
    if _HANDLE in model.__dict__:
        return
    model.__dict__[_WATCH] = _Watch(model)
    model.__dict__[_HANDLE] = (
        model.register_forward_pre_hook(_before_forward),
        model.register_load_state_dict_pre_hook(_before_load),
    )


def remove(model: nn.Module) -> None:
    """Undo `install`."""
    for handle in model.__dict__.pop(_HANDLE, ()):
        handle.remove()
    model.__dict__.pop(CHECKED, None)
    model.__dict__.pop(_SEEN, None)
    model.__dict__.pop(_WATCH, None)


def _before_load(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """Load the codes of Linear layers; refuse LoRA weights for layers without effect."""
    load_linears(model, state_dict, prefix, rest[-1])
    keys = (unwrapped_name(key.removeprefix(prefix)).partition(".lora_") for key in state_dict)
    owners = {owner for owner, lora, _ in keys if lora}
    if not owners:
        return
    for name, module, _ in iter_packed(model):
        if unwrapped_name(name) in owners and lora_source(module) is None:
            raise AdapterError(
                _message("being loaded", unwrapped_name(name), "would have no effect")
            )


def _before_forward(model: nn.Module, args: Any) -> None:
    watch: _Watch | None = model.__dict__.get(_WATCH)
    if watch is not None:
        if not torch.compiler.is_compiling():
            watch.model = weakref.ref(model)  # copy.copy has the watch of the model it copied
        watch.override_forwards()
    if torch.compiler.is_compiling():
        return
    check_codes(model)
    world().before_forward(model)
    configs: dict[str, Any] | None = getattr(model, "peft_config", None)
    if not configs:
        return
    # walk the modules only after adapters were added or removed
    seen = tuple((name, id(config)) for name, config in configs.items())
    if model.__dict__.get(_SEEN) != seen:
        check(model, configs)
        model.__dict__[_SEEN] = seen


def check_codes(model: nn.Module) -> None:
    """Raise where packed codes, of experts or Linear layers, were cast, which destroys them."""
    watch: _Watch | None = model.__dict__.get(_WATCH)
    if watch is None:
        return
    if watch.codes is None:
        watch.codes = tuple(
            (unwrapped_name(name).replace("parametrizations.", "").removesuffix(".original"), ref)
            for name, parameter in model.named_parameters()
            if isinstance(parameter, Params4bit)
            and parameter.quant_storage.is_floating_point
            and (ref := weakref.ref(parameter))
        )
    for name, ref in watch.codes:
        codes = ref()
        if codes is None or codes.dtype == codes.quant_storage:
            continue
        # bitsandbytes converts Linear layers to another layout on some CPUs in evaluation
        if not getattr(codes.quant_state, "packing_format_for_cpu", False):
            raise QuantizationError(
                f"The packed codes of {name} were cast from {codes.quant_storage} to "
                f"{codes.dtype}, which destroys them: load the model again, and leave its dtypes "
                "alone or set bnb_4bit_quant_storage=torch.uint8, which casts do not touch."
            )


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
                    raise AdapterError(_message(repr(adapter), name, "was not created"))
                if getattr(wrapper, "lora_source", None) is None:
                    raise AdapterError(_message(repr(adapter), name, "would have no effect"))


def _message(adapter: str, name: str, what: str) -> str:
    return (
        f"LoRA adapter {adapter} on {name} {what}: stock PEFT cannot adapt packed experts by "
        "itself; use moe_qlora.get_peft_model (moe_qlora.load_adapter for a saved adapter), or "
        "give stock PEFT the config from moe_qlora.adapt_lora_config."
    )
