"""Bytes of optimizer states, by optimizer; free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit")

ALIASES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
}
"""Other names that transformers' Trainer has for these."""

_FLOAT32 = 4
# bitsandbytes' own limits: weights to a block of statistics, and the smallest tensor whose moments
# are kept in 8 bit, and in pages.
_BLOCK = 256
_SMALLEST_8BIT = 4096
_SMALLEST_PAGED = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What an optimizer holds."""

    resident: int  # On the device at any time
    paged: int  # In pages that move to the device while they are used
    step: int  # On the device for the moment of a step, beside states and gradients


def optimizer_nbytes(optimizer: str, sizes: Iterable[int], itemsize: int) -> OptimizerBytes:
    """Return the bytes for trained tensors of these sizes, in weights of `itemsize` bytes."""
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optimizer is {optimizer!r}; expected one of {known}")
    if optimizer == "adamw":
        # The step takes the root of all second moments at once (torch's foreach implementation).
        total = itemsize * sum(sizes)
        return OptimizerBytes(2 * total, 0, total)
    resident = paged = 0
    for size in sizes:
        eight = optimizer.endswith("8bit") and size >= _SMALLEST_8BIT
        moments = 2 * size * (1 if eight else _FLOAT32)
        resident += 2 * _FLOAT32 * -(-size // _BLOCK) if eight else 0
        if optimizer.startswith("paged") and size >= _SMALLEST_PAGED:
            paged += moments
        else:
            resident += moments
    return OptimizerBytes(resident, paged, 0)
