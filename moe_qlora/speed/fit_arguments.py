"""What `fit_memory` is given: errors that say what to change, and what follows from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..layout import parse_bytes
from ..lora.targets import base_model
from ..packing.decoders import PackedList
from .fitted import decoder_layers

_PAIRS_ON_CPU = 1 << 29
"""Most pairs of tokens in a measured step on a CPU; one of 2^33 takes nine minutes."""
_SHORT = 4096  # Tokens of a sequence, up to which attention takes less time than the rest


def check_loss(loss: Any) -> None:
    """Raise a ConfigError unless it is a function or None."""
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r}; give a function of the model and a batch, or None.")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's decoder layers by name."""
    base = base_model(model)
    found = decoder_layers(base)
    if not found:
        raise ConfigError(
            f"fit_memory: {type(base).__name__} has no decoder layers that transformers can "
            "compute again (GradientCheckpointingLayer), so that there is nothing to decide."
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    """Return the one device that a model lies on; experts in host memory belong to it."""
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        raise ConfigError(
            f"fit_memory: {sharded[0]} is sharded over ranks, so that no step of one rank alone "
            "can be measured; call fit_memory before fully_shard or trainer.train()."
        )
    hosted = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, PackedList) and module.host is not None
        for parameter in module.parameters()
    }
    own = [parameter for parameter in model.parameters() if id(parameter) not in hosted]
    devices = {str(parameter.device): parameter.device for parameter in own}
    if len(devices) > 1:
        raise ConfigError(
            f"fit_memory: the model lies on {' and '.join(sorted(devices))}; load it on one device "
            '(device_map={"": 0}), which is where memory is fitted.'
        )
    device = next(iter(devices.values()))
    if device.type == "meta":
        raise ConfigError(
            "fit_memory: the model is on meta, where nothing can be measured; load its weights "
            "first, or ask moe_qlora.plan what its layers can keep."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "fit_memory: no weight of the model is trained; call it after get_peft_model."
        )
    return device


def limit_of(memory: int | str | None, device: torch.device) -> int:
    """Return the bytes that tensors may take on a device."""
    if memory is None:
        if device.type != "cuda":
            raise ConfigError(
                f'memory is None, and the model is on {device}: give it, as in memory="24GiB".'
            )
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    try:
        size = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise ConfigError(f"memory is {memory!r}: {error}.") from error
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ConfigError(f'memory is {memory!r}; give bytes, or a text such as "24GiB".')
    return size


def meant(memory: int) -> str:
    """Return the sentence that a number of bytes which holds no model is meant otherwise."""
    return f'memory={memory} is a number of bytes; write "{memory}GiB". ' if memory < 1024 else ""


def check_time(batch: int, seq: int, device: torch.device) -> None:
    """Raise a ConfigError where a CPU would take minutes for the steps that are measured."""
    if device.type == "cpu" and batch * seq * max(seq, _SHORT) > _PAIRS_ON_CPU:
        raise ConfigError(
            f"fit_memory runs steps of batch_size={batch} x seq_len={seq} tokens to measure them, "
            "which takes many minutes on a CPU: take a smaller batch_size or seq_len, or ask "
            "moe-qlora plan, which runs nothing."
        )
