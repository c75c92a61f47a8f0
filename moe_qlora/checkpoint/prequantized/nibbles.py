"""Two codes of four bits in a byte, the first in the low half."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_nibbles(codes: Tensor, table: Sequence[float]) -> Tensor:
    """Return the values (r, 2 w), fp32, of bytes (r, w): `table[low], table[high]` of each."""
    pairs = [(low, high) for high in table for low in table]
    values = torch.tensor(pairs, dtype=torch.float32, device=codes.device)
    index = codes.contiguous().view(torch.uint8).int().flatten()
    both = values.view(torch.int64).flatten().index_select(0, index)  # a pair at a time
    return both.view(torch.float32).view(codes.shape[0], -1)
