"""Sorted rows in tiles of any size, as kernels read them of a `Routing`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def tiled(offsets: Tensor, count: int, tile: int, order: Any = None, top_k: int = 1) -> Any:
    """`count` rows, of which experts have those between their `offsets` `(E + 1,)`."""
    ends = offsets.tolist()
    experts = len(ends) - 1
    table = [[e, first] for e in range(experts) for first in range(ends[e], ends[e + 1], tile)]
    tiles = torch.tensor([*table, [-1, 0]], dtype=torch.int32, device=offsets.device).flatten()
    return SimpleNamespace(
        expert_offsets=offsets, experts=experts, count=count, order=order, top_k=top_k,
        tiles=tiles, table=lambda tile: tiles,
    )  # fmt: skip
