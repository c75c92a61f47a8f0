"""What LoRA on packed experts cannot have: refused in a sentence, before PEFT sees the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from peft import LoraConfig, PeftConfig, PeftType
from torch import nn

from ..checkpoint.adapter import LORA_VARIANTS, Variant, unsupported
from ..errors import ConfigError
from ..experts.forward import can_serve
from ..packing.parametrize import read_packed

_UNSUPPORTED: tuple[Variant, ...] = (
    *LORA_VARIANTS,
    ("lora_bias", (False,), "an expert weight has no bias for LoRA to add to"),
    ("init_lora_weights", (True, False, "gaussian"), "it reads or changes the unpacked weights"),
    ("fan_in_fan_out", (False, None), "expert weights carry their own orientation"),
)


def is_lora(config: PeftConfig) -> bool:
    """Tell whether this is LoRA, a host's own class included; AdaLoRA is so by class alone."""
    return isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA


def check_modules_to_save(config: PeftConfig, packed: Collection[str]) -> None:
    """Refuse to train packed experts in full: their weight, their module, or one around it."""
    for name in packed:
        parts = name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for key in getattr(config, "modules_to_save", None) or ():
            if any(path.endswith(key) for path in paths):  # as PEFT does, which needs no dot
                raise ConfigError(
                    f"modules_to_save={key!r} asks to train {name} in full, which is packed and "
                    "stays frozen; leave it out, or use target_parameters to train LoRA on it."
                )


def check_supported(
    config: PeftConfig, experts: Collection[str], packed: Mapping[str, nn.Module]
) -> None:
    """Refuse settings, and shapes of weights, that LoRA on packed parameters cannot have."""
    if not experts:
        return
    first, *_ = experts
    for name in experts:
        shape = tuple(read_packed(packed[name], name.rpartition(".")[2]).shape)
        if len(shape) > 3:
            raise ConfigError(
                f"target_parameters names {name}, a weight of shape {shape}: PEFT adapts "
                "parameters of two or three dimensions; leave it out."
            )
    if found := unsupported(_UNSUPPORTED, partial(getattr, config)):
        field, value, reason = found
        shown = value if isinstance(value, (bool, int, str)) else type(value).__name__
        raise ConfigError(
            f"{field}={shown!r} does not work for LoRA on packed experts ({first}): {reason}; "
            "unset it, or leave the experts out of target_parameters."
        )
    if not is_lora(config):
        raise ConfigError(
            f"{type(config).__name__} does not work for packed experts ({first}); use a LoraConfig "
            "for them."
        )
    for name in experts:
        check_dropout(name, packed[name], getattr(config, "lora_dropout", 0.0))


def check_dropout(name: str, module: nn.Module, probability: float) -> None:
    """Refuse dropout where only the module's own forward runs, which reads the sum W + s B A."""
    if probability and not can_serve(module):
        raise ConfigError(
            f"lora_dropout={probability} does not work for {name} of {type(module).__name__}, "
            "whose forward multiplies by the weight itself; set lora_dropout=0, or leave these "
            "experts out of target_parameters."
        )
