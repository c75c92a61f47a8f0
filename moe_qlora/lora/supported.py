"""moe_qlora/lora/supported.py: to be described."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftConfig, PeftType
from torch import nn

from ..detection.detect import dispatches
from ..errors import ConfigError
from ..packing.parametrize import read_packed

# Settings that PEFT cannot apply to a stacked expert parameter, or that need the unpacked weight:
# field, the value that leaves it off, and what to say.
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (False,), "DoRA needs the norm of each unpacked weight row"),
    ("lora_bias", (False,), "an expert stack has no bias for LoRA to add to"),
    (
        "init_lora_weights",
        (True, False, "gaussian"),
        "this initialization reads or changes the unpacked weights",
    ),
    ("fan_in_fan_out", (False, None), "expert stacks carry their own orientation"),
    ("use_qalora", (False,), "QA-LoRA pools Linear inputs"),
    ("use_bdlora", (None, False), "block-diagonal LoRA is defined for Linear layers"),
    ("velora_config", (None,), "VeLoRA is defined for Linear layers"),
    ("kasa_config", (None,), "KaSA rewrites the unpacked weights"),
    ("monteclora_config", (None,), "MonteCLoRA is defined for Linear layers"),
    ("arrow_config", (None,), "Arrow routes between Linear adapters"),
    (
        "alora_invocation_tokens",
        (None,),
        "activated LoRA masks tokens, which the experts no longer see in order",
    ),
    ("layer_replication", (None,), "replicated layers would share packed storage"),
    ("megatron_config", (None,), "Megatron layers are not packed"),
)


def _is_lora(config: PeftConfig) -> bool:
    """Whether this is LoRA, a host's own LoraConfig included; AdaLoRA's is one by class alone."""
    return isinstance(config, LoraConfig) and config.peft_type == PeftType.LORA


def _check_modules_to_save(config: PeftConfig, packed: dict[str, nn.Module]) -> None:
    for name in packed:
        module = name.rpartition(".")[0]
        parts = module.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for key in getattr(config, "modules_to_save", None) or ():
            if any(owner == key or owner.endswith(f".{key}") for owner in owners):
                raise ConfigError(
                    f"modules_to_save={key!r} asks to train {name} in full, which is packed and "
                    f"stays frozen; leave "
                    "it out, or use target_parameters to train LoRA on it."
                )


def _check_supported(config: LoraConfig, chosen: list[str], packed: dict[str, nn.Module]) -> None:
    for name in chosen:
        shape = tuple(read_packed(packed[name], name.rpartition(".")[2]).shape)
        if len(shape) > 3:
            raise ConfigError(
                f"target_parameters names {name}, a stack of shape {shape}: PEFT adapts parameters "
                "of two or three dimensions; leave it out."
            )
    for field, off, reason in _UNSUPPORTED:
        value = getattr(config, field, off[0])
        if not any(
            value is allowed or (isinstance(value, str) and value == allowed) for allowed in off
        ):
            shown = value if isinstance(value, (bool, int, str)) else type(value).__name__
            raise ConfigError(
                f"{field}={shown!r} does not work for LoRA on packed experts ({chosen[0]}): "
                f"{reason}; unset it, or "
                "leave the experts out of target_parameters."
            )
    if not _is_lora(config):
        raise ConfigError(
            f"{type(config).__name__} does not work for packed experts ({chosen[0]}); use a "
            f"LoraConfig for them."
        )
    stuck = next((name for name in chosen if not dispatches(packed[name])), None)
    if config.lora_dropout and stuck is not None:
        raise ConfigError(
            f"lora_dropout={config.lora_dropout} does not work for {stuck} of "
            f"{type(packed[stuck]).__name__}, whose forward multiplies by the weight itself; set "
            "lora_dropout=0, or leave these experts out of target_parameters."
        )
