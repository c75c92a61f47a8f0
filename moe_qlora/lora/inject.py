"""How wrappers for packed experts get into a model that stock PEFT walks.

wrap_parameter       makes one wrapper, where it would be on the unpacked model
upgrade_wrappers     turns wrappers that stock PEFT made into `ParamWrapper`s
check_connected      raises where LoRA on a packed parameter would have no effect
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from torch import nn

from ..detection.tree import join
from ..errors import AdapterError, ConfigError
from ..layout import unwrapped, unwrapped_name
from ..packing.parametrize import is_packed, packed_names, read_packed
from ..packing.settings import CodecSettings
from ..world import share_of
from .layer import ExpertAdapters, ParamWrapper
from .names import names_parameter, packed_parameters


def wrap_parameter(
    target: nn.Module,
    adapter_name: str,
    config: LoraConfig,
    parameter_name: str | None = None,
    **kwargs: Any,
) -> nn.Module | None:
    """Wrap one parameter of `target`, which may be wrapped already; None leaves it to PEFT.

    PEFT comes in alphabetical order; here the parameter that was registered first is innermost.
    """
    base = unwrapped(target)
    if kwargs.get("target_name") in getattr(config, "_awaited", ()):
        _check_loaded(kwargs["target_name"], base, config)
    if parameter_name is None or not packed_names(base):
        return None
    order = _registration_order(base)
    outer: ParamWrapper | None = None
    inner, source = target, None
    while isinstance(inner, ParamWrapper):
        source = inner.lora_source
        if order.index(inner.parameter_name) < order.index(parameter_name):
            break
        outer, inner = inner, inner.base_layer
    wrapper = ParamWrapper(inner, adapter_name, parameter_name, config=config, **kwargs)
    wrapper.connect(source or ExpertAdapters())
    if outer is None:
        return wrapper
    outer.base_layer = wrapper
    return target


def upgrade_wrappers(model: nn.Module) -> None:
    """Turn stock wrappers around packed experts into `ParamWrapper`s, in place.

    Parameters and optimizer state stay; names become those of the unpacked model.
    """
    for name, module in list(model.named_modules()):
        chain: list[Any] = []
        base: nn.Module = module
        while isinstance(base, StockParamWrapper):
            chain.append(base)
            base = base.base_layer
        outermost = unwrapped_name(name) == name and packed_names(unwrapped(module))
        if not outermost or all(isinstance(wrapper, ParamWrapper) for wrapper in chain):
            continue
        if share_of(base) is not None:
            raise AdapterError(
                f"The experts of {unwrapped_name(name)} are divided over ranks, and stock PEFT has "
                "made LoRA for those of this rank alone: create adapters with "
                "moe_qlora.get_peft_model, or give PEFT a config from moe_qlora.adapt_lora_config."
            )
        order = _registration_order(base)
        chain.sort(key=lambda wrapper: -order.index(wrapper.parameter_name))
        source = ExpertAdapters()
        for wrapper, inner in zip(chain, [*chain[1:], base], strict=True):
            wrapper.__class__ = ParamWrapper
            wrapper.full_name = join(name, wrapper.parameter_name)
            wrapper.base_layer = inner
        for wrapper in chain:
            wrapper.connect(source)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, chain[0])


def check_connected(model: nn.Module, adapter_name: str, config: Any) -> None:
    """Raise where LoRA on a packed parameter that the config names has no effect."""
    targets = getattr(config, "target_parameters", None) or ()
    wrappers = {
        f"{unwrapped_name(name)}.{module.parameter_name}": module
        for name, module in model.named_modules()
        if isinstance(module, StockParamWrapper)
    }
    for parameter in packed_parameters(model):
        if not any(names_parameter(target, parameter) for target in targets):
            continue
        fault = _fault(wrappers.get(parameter), adapter_name)
        if fault:
            raise AdapterError(
                f"LoRA adapter {adapter_name!r} on {parameter} {fault}, so it would have no "
                "effect; create adapters with moe_qlora.get_peft_model, or moe_qlora.load_adapter "
                "for saved ones."
            )


def _fault(wrapper: Any, adapter_name: str) -> str:
    if wrapper is None:
        return "was not created"
    if adapter_name not in wrapper.lora_A:
        return "is missing from its wrapper"
    if not isinstance(wrapper, ParamWrapper):
        return "was created by stock PEFT over a packed weight"
    source = wrapper.lora_source
    if source is None or source.wrappers.get(wrapper.parameter_name) is not wrapper:
        return "is not connected with the experts module"
    return ""


def _check_loaded(name: str, base: nn.Module, config: Any) -> None:
    """Compare a parameter that was yet to be loaded with what the config was made for."""
    leaf = name.rpartition(".")[2]
    advice = (
        "call moe_qlora.enable() before the trainer loads the model, and give the trainer the "
        "quantization_config that adapt_lora_config got."
    )
    if not is_packed(base, leaf):
        raise ConfigError(
            f"{name} is not packed, and this LoRA config was adapted to a model whose experts "
            f"are: {advice}"
        )
    loaded, expected = CodecSettings.of(read_packed(base, leaf)), config._packed.settings
    if loaded.codec.is_kept:
        return  # the checkpoint decides how, and not the quantization_config
    for field in ("kind", "double_quant", "blocksize"):
        seen, asked = getattr(loaded, field), getattr(expected, field)
        if seen != asked:
            raise ConfigError(
                f"{name} is packed with {field}={seen!r}, and this LoRA config was adapted to "
                f"{field}={asked!r}: {advice}"
            )


def _registration_order(base: nn.Module) -> list[str]:
    plain = [name for name, _ in base.named_parameters(recurse=False)]
    return [*packed_names(base), *plain]
