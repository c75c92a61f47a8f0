"""Bytes of optimizer states; free of torch.

    adamw             two moments in the parameters' own dtype, as torch.optim.AdamW keeps them
    adamw_8bit        two bytes a weight and two float32 for each block of 256 (bitsandbytes)
    paged_adamw       two float32 moments that live in pages: none on the device until they are used
    paged_adamw_8bit  the 8-bit moments in pages; their block statistics are not paged

bitsandbytes keeps tensors under 4096 weights in float32, and pages none under 100,000 weights.
"""

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

_WIDE = 4
_BLOCK = 256
_SMALL_8BIT = 4096
_SMALL_PAGED = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What an optimizer holds.

    Attributes:
        resident: On the device for good.
        paged: In pages that move to the device while they are used.
        step: On the device for the moment of a step, beside states and gradients.
    """

    resident: int
    paged: int
    step: int

    def __add__(self, other: OptimizerBytes) -> OptimizerBytes:
        return OptimizerBytes(
            self.resident + other.resident, self.paged + other.paged, self.step + other.step
        )


def optimizer_nbytes(optimizer: str, sizes: Iterable[int], itemsize: int) -> OptimizerBytes:
    """Bytes for trained tensors of these sizes.

    Args:
        optimizer: One of `OPTIMIZERS`.
        sizes: Number of weights of each trained tensor.
        itemsize: Bytes of one of their elements.

    Raises:
        ValueError: There is no such optimizer.
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optimizer is {optimizer!r}; expected one of {known}")
    total = OptimizerBytes(0, 0, 0)
    for size in sizes:
        total += _of_one(optimizer, size, itemsize)
    return total


def _of_one(optimizer: str, size: int, itemsize: int) -> OptimizerBytes:
    if optimizer == "adamw":
        # The step takes the root of all second moments at once (torch's foreach implementation).
        return OptimizerBytes(2 * size * itemsize, 0, size * itemsize)
    eight = optimizer.endswith("8bit") and size >= _SMALL_8BIT
    moments = 2 * size * (1 if eight else _WIDE)
    statistics = 2 * _WIDE * -(-size // _BLOCK) if eight else 0
    if optimizer.startswith("paged") and size >= _SMALL_PAGED:
        return OptimizerBytes(statistics, moments, 0)
    return OptimizerBytes(moments + statistics, 0, 0)
