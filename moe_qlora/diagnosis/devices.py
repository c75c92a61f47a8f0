"""Devices that are here, or one that is named, and what multiplies on them."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ..experts.backend import suits
from ..kernels.cards import (
    HOPPER,
    SMALL_SHARED,
    Card,
    acting_as,
    actual,
    allows_hopper,
    multiplies_by_torch,
)
from ..memory.devices import GPUS, gpu_named, unknown_gpu
from .report import Device

_SHARED = {(7, 0): 96 << 10, (7, 5): 64 << 10, (8, 0): 163 << 10}
_SHARED |= {(9, 0): 227 << 10, (10, 0): 227 << 10}
"""Bytes of shared memory that a program may take, by compute capability, where not SMALL_SHARED."""

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_LOOP = "expert by expert, in plain torch"


def named(text: str) -> tuple[Device, Card]:
    """Return the card that a person names, such as "4090"; a `ConfigError` where it is unknown."""
    try:
        name = gpu_named(text)
    except ValueError as error:
        raise ConfigError(f"gpu: {error}.") from error
    if name is None:
        raise ConfigError(f"gpu: {text.strip()!r} is no {unknown_gpu(text)}.")
    gpu = GPUS[name]
    card = Card("nvidia", gpu.capability, _SHARED.get(gpu.capability, SMALL_SHARED))
    return _described(name, gpu.nbytes, card, here=False), card


def here() -> list[tuple[Device, Card]]:
    """Return every GPU of this machine; the CPU where it has none."""
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        card = actual(device)
        found.append((_described(properties.name, properties.total_memory, card, here=True), card))
    return found or [(_described("CPU", None, actual(_CPU), here=True), actual(_CPU))]


def _described(name: str, nbytes: int | None, card: Card, *, here: bool) -> Device:
    capability = ".".join(map(str, card.capability)) if card.maker == "nvidia" else ""
    few, many = _multipliers(card)
    return Device(name, nbytes, capability, here, few, many)


def _multipliers(card: Card) -> tuple[str, str]:
    """Return what multiplies on a card, where experts have few tokens and where they have many."""
    if not suits(card):
        return _LOOP, _LOOP
    with acting_as(card):
        hopper = card.capability == HOPPER and allows_hopper()
        by_torch = multiplies_by_torch(_CUDA, torch.bfloat16)
    tried = ", untested on ROCm" if card.maker == "amd" else ""
    return (
        f"{'Hopper' if hopper else 'portable'} quantized matmul{tried}",
        f"{'torch' if by_torch else 'own Triton'} grouped matmul{tried}",
    )
