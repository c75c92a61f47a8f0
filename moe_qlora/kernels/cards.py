"""Device capabilities, and which grouped matmul each device uses.

torch's grouped matmul is quick for bf16 on compute capability 9 and 10. Elsewhere, and for fp16,
it copies the experts' offsets to the host and calls cuBLAS expert by expert (GroupedBlas.cpp, torch
2.9 to 2.13), which waits for the device and cannot be captured: `grouped_mm.py` replaces it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

HALVES = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)  # Its compute capability
META = -2  # Stands for the index of a CUDA device where tensors are on meta
SMALL_SHARED = 99 << 10  # Bytes of shared memory that a program may use on 8.6, 8.9 and 12.0
_SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (9, 0): 227, (10, 0): 227}  # KiB on others


class Card(NamedTuple):
    """A device, as far as kernels depend on it."""

    maker: str  # "nvidia", "amd", "intel", or "" for the CPU
    capability: tuple[int, int]  # Of CUDA, (0, 0) for others
    shared: int  # Bytes of shared memory that one program may use

    @property
    def runs_on(self) -> bool:
        """Whether matrix units read from shared memory, as Hopper's and large Blackwells' do."""
        return self.capability[0] in (9, 10)


PORTABLE = Card("nvidia", (8, 6), SMALL_SHARED)  # The least capable one that kernels run on
_acting: Card | None = None
_planned: ContextVar[Card | None] = ContextVar("planned", default=None)


def of_capability(capability: tuple[int, int]) -> Card:
    """Return the NVIDIA card of a compute capability."""
    shared = _SHARED[capability] << 10 if capability in _SHARED else SMALL_SHARED
    return Card("nvidia", capability, shared)


@contextmanager
def acting_as(card: Card) -> Iterator[None]:
    """Choose kernels as for another card within the block, in all threads: for tests."""
    global _acting
    before, _acting = _acting, card
    try:
        yield
    finally:
        _acting = before


@contextmanager
def planned_for(card: Card) -> Iterator[None]:
    """Choose kernels for tensors on meta as for this card, in this thread.

    Launches on meta compute nothing (`lang.py`), so that a layer's allocations can be counted.
    """
    token = _planned.set(card)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_card(device: torch.device) -> Card | None:
    """Return the card that tensors on meta are planned for, None for any other device."""
    return _planned.get() if device.type == "meta" else None


def card(device: torch.device) -> Card:
    """Return a device's card, or the one of `acting_as`; for meta the one of `planned_for`."""
    if device.type == "meta":
        return _planned.get() or actual(device)
    return actual(device) if _acting is None else _acting


def of_index(index: int) -> Card:
    """Return the card of an index, as of `device_of`."""
    return card(device_of(index))


@cache
def device_of(index: int) -> torch.device:
    """Return the CUDA device of an index, the CPU for -1, meta for `META`."""
    if index < 0:
        return torch.device("meta" if index == META else "cpu")
    return torch.device("cuda", index)


@cache
def actual(device: torch.device) -> Card:
    """Return a device's own card, `acting_as` or not."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return Card("amd", (0, 0), properties.shared_memory_per_block)
        shared = getattr(properties, "shared_memory_per_block_optin", SMALL_SHARED)
        return Card("nvidia", (properties.major, properties.minor), shared)
    xpu = device.type == "xpu"
    return Card("intel" if xpu else "", (0, 0), 64 << 10 if xpu else SMALL_SHARED)


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels may contain PTX, NVIDIA's assembly; on the CPU they only compile."""
    return actual(device).maker in ("nvidia", "")


def multiplies_by_torch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped matmul computes a product there, else `grouped_mm.py`."""
    if device.type == "cpu" or dtype not in HALVES:
        return True
    return dtype == torch.bfloat16 and card(device).runs_on
