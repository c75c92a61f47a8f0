"""How the quantized matmul's kernels are cut, and where they find their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cards


class Config(NamedTuple):
    """How the kernel is cut."""

    features: int  # Features that come out of a program, a multiple of 64
    step: int  # Features summed over in a step, a multiple of 64
    stages: int  # Steps loaded ahead
    warps: int  # Warps in a program
    direct: bool  # Whether a nested absmax is decoded by each program, else in a pass of its own
    own: str = ""  # Which kernel in Gluon it is, whose cut is fixed; "" for the portable one

    @property
    def hopper(self) -> bool:
        """Whether it is one of Hopper's own kernels."""
        return self.own in ("shared", "registers")


class Gather(NamedTuple):
    """Where the matmul finds its rows, which nobody has copied."""

    order: Tensor  # `(R,)`, and some more: `routing.Routing.order`
    products: Tensor  # `(R r,)`: what would be the rows' last r columns
    top_k: int  # Row i is the token order[i] // top_k
    rows: int  # R


HOPPER = Config(128, 64, 4, 4, False, "shared")
"""The kernel of `quantized_mm_hopper.py`, whose weights go through shared memory."""

REGISTERS = Config(128, 64, 4, 8, False, "registers")
"""That of `quantized_mm_registers.py`: forward alone, in tiles of 256 rows, columns reordered."""

FEW = Config(64, 256, 4, 4, True, "few")
"""That of `quantized_mm_few.py`: forward alone, in tiles of 16 rows, on all cards of NVIDIA's."""

_LARGE = {
    (False, 16): Config(128, 64, 3, 4, True),
    (False, 32): Config(128, 64, 3, 4, True),
    (False, 64): Config(256, 64, 3, 4, False),
    (False, 128): Config(128, 64, 3, 4, False),
    (True, 16): Config(64, 64, 3, 4, False),
    (True, 32): Config(128, 64, 3, 4, False),
    (True, 64): Config(128, 64, 3, 4, False),
    (True, 128): Config(128, 64, 3, 4, False),
}
"""What is used untuned, by direction and tile: the quickest on an H200 for Qwen3-30B-A3B."""

_EIGHT_WARPS = Config(128, 64, 3, 8, False)

_SMALL = _LARGE | {(back, tile): _EIGHT_WARPS for back in (False, True) for tile in (64, 128)}
"""The same on cards that hold what they multiply in registers: four warps have too few of them."""


def default(tile: int, device: torch.device, *, back: bool) -> Config:
    """Return the configuration that is used untuned for tiles of so many rows."""
    return (_LARGE if cards.card(device).runs_on else _SMALL)[back, tile]


def fits(config: Config, tile: int, kind: str, card: cards.Card) -> bool:
    """Whether a card may have the registers for a cut's sums, and the memory for what it loads.

    Triton may want more memory, for the weights and the absmax, by its own choice of layouts: it
    says so before such a kernel runs.
    """
    sums = 128 if card.runs_on else 64
    if tile * config.features > sums * 32 * config.warps:
        return False
    codes = config.features * config.step // (1 if kind == "int8" else 2)
    return (config.stages - 1) * (2 * tile * config.step + codes) <= card.shared
