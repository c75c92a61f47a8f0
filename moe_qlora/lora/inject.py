"""moe_qlora/lora/inject.py: to be described."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from torch import nn

from ..errors import AdapterError, ConfigError
from ..packing import codec
from ..packing.parametrize import is_packed, packed_names, read_packed
from .layer import ExpertAdapters, ParamWrapper, _innermost


def register_wrapper(config: LoraConfig) -> None:
    """Have PEFT wrap parameters of packed modules with this file's `ParamWrapper`.

    Uses the config's own table of layer classes (`LoraConfig._register_custom_module`), so that it
    holds for this config alone, in stock `peft.get_peft_model` too.
    """
    config._register_custom_module({nn.Module: wrap_parameter})


def wrap_parameter(
    target: nn.Module,
    adapter_name: str,
    config: LoraConfig,
    parameter_name: str | None = None,
    **kwargs: Any,
) -> nn.Module | None:
    """Wrap one parameter of `target`, which may be wrapped already; None leaves it to PEFT.

    PEFT goes through full parameter names in alphabetical order. The new wrapper is put where it
    would be on the unpacked model, where they come in registration order: the first one registered
        is innermost.

    Raises:
        ConfigError: The config was made for a model that was yet to be loaded, and this parameter
            is not packed by now, or in another way.
    """
    base = _innermost(target)
    if kwargs.get("target_name") in getattr(config, "_awaited", ()):
        _check_arrived(kwargs["target_name"], base, config)
    if parameter_name is None or not packed_names(base):
        return None
    order = _registration_order(base)
    outer: ParamWrapper | None = None
    inner, provider = target, None
    while isinstance(inner, ParamWrapper):
        provider = inner.provider
        if order.index(inner.parameter_name) < order.index(parameter_name):
            break
        outer, inner = inner, inner.base_layer
    wrapper = ParamWrapper(inner, adapter_name, parameter_name, config, **kwargs)
    wrapper.connect(provider or ExpertAdapters())
    if outer is None:
        return wrapper
    outer.base_layer = wrapper
    return target


def _check_arrived(name: str, base: nn.Module, config: Any) -> None:
    """Hold a parameter that was to be loaded packed against what the config was made for."""
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
    found, expected = codec.settings_of(read_packed(base, leaf)), config._packed.settings
    for field in ("kind", "double_quant", "blocksize"):
        if getattr(found, field) != getattr(expected, field):
            raise ConfigError(
                f"{name} is packed with {field}={getattr(found, field)!r}, and this LoRA config "
                f"was adapted to {field}={getattr(expected, field)!r}: {advice}"
            )


def _registration_order(base: nn.Module) -> list[str]:
    plain = [name for name, _ in base.named_parameters(recurse=False)]
    return [*packed_names(base), *plain]


def adopt(model: nn.Module) -> int:
    """Turn stock wrappers around packed experts into ours, in place; the number of wrappers turned.

    For hosts that create the adapter with stock PEFT and a config that `adapt_lora_config` has not
    seen: parameters and optimizer state stay, names become those of the unpacked model.
    """
    stock = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, StockParamWrapper)
        and packed_names(_innermost(module))
        and ".base_layer" not in name
    ]
    turned = 0
    for name, top in stock:
        chain: list[Any] = []
        node: nn.Module = top
        while isinstance(node, StockParamWrapper):
            chain.append(node)
            node = node.base_layer
        if all(isinstance(wrapper, ParamWrapper) for wrapper in chain):
            continue
        order = _registration_order(node)
        chain.sort(key=lambda wrapper: -order.index(wrapper.parameter_name))
        provider = ExpertAdapters()
        for wrapper, inner in zip(chain, [*chain[1:], node], strict=True):
            wrapper.__class__ = ParamWrapper
            wrapper.base_layer = inner
        for wrapper in chain:
            wrapper.connect(provider)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, chain[0])
        turned += len(chain)
    return turned


def check_connected(model: nn.Module, adapter_name: str, parameters: list[str]) -> None:
    """Make sure that LoRA on each of these packed parameters takes part in the forward.

    Raises:
        AdapterError: a parameter has no wrapper with this adapter, a stock one, or one that its
        module does not know.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, StockParamWrapper):
            owner = name.replace(".base_layer", "")
            found[f"{owner}.{module.parameter_name}"] = module
    for parameter in parameters:
        wrapper = found.get(parameter)
        seen = _fault(wrapper, adapter_name)
        if seen:
            raise AdapterError(
                f"LoRA adapter {adapter_name!r} on {parameter} {seen}, so it would have no "
                f"effect; create adapters with "
                "moe_qlora.get_peft_model, or moe_qlora.load_adapter for saved ones."
            )


def _fault(wrapper: Any, adapter_name: str) -> str:
    if wrapper is None:
        return "was not created"
    if adapter_name not in wrapper.lora_A:
        return "is missing from its wrapper"
    if not isinstance(wrapper, ParamWrapper):
        return "was created by stock PEFT over a packed weight"
    if (
        wrapper.provider is None
        or wrapper.provider.wrappers.get(wrapper.parameter_name) is not wrapper
    ):
        return "is not connected with the experts module"
    return ""
