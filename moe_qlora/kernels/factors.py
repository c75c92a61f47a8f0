"""LoRA factors: as PEFT stores them, and as the fused layer's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import row_launches
from .launch import aligned
from .limits import padded


class Lora(NamedTuple):
    """One projection's factors, as PEFT stores them."""

    a: Tensor  # `(E r, in)`, expert slowest
    b: Tensor  # `(out, r E)`, expert fastest
    scaling: float


class Factors(NamedTuple):
    """LoRA factors as the kernels read them: a `(E, r, in)`, b `(E, out, r)`, r padded."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r, padded."""
        return self.a.shape[1]


def pad_factors(
    loras: Sequence[Lora | None], experts: int, dtype: torch.dtype
) -> list[Factors | None]:
    """Return both projections' factors as the matmuls read them, ranks padded by zeros."""
    factors = [_with_room(lora, experts, dtype) for lora in loras]
    pairs = [(lora, f) for lora, f in zip(loras, factors, strict=True) if lora and f]
    if not pairs:
        return factors
    (lora1, f1), (lora2, f2) = pairs[0], pairs[-1]
    total1 = f1.b.shape[1] * f1.rank
    total2 = f2.b.shape[1] * f2.rank if len(pairs) == 2 else 0
    ranks = lora1.a.shape[0] // experts, f1.rank, lora2.a.shape[0] // experts, f2.rank
    plain1, plain2 = aligned(lora1.b.contiguous()), aligned(lora2.b.contiguous())
    kinds = dtype, plain1.dtype, plain2.dtype
    launch = row_launches.spread(experts, total1, total2, ranks, kinds, f1.b.get_device())
    launch(plain1, plain2, f1.b, f2.b, total1, total2)
    return factors


def _with_room(lora: Lora | None, experts: int, dtype: torch.dtype) -> Factors | None:
    """Return `Factors` whose b is room only."""
    if lora is None:
        return None
    rank = lora.a.shape[0] // experts
    wide = padded(rank)
    a = lora.a.to(dtype).contiguous().view(experts, rank, lora.a.shape[1])
    if wide != rank:
        a = F.pad(a, (0, 0, 0, wide - rank))
    b = torch.empty(experts, lora.b.shape[0], wide, dtype=dtype, device=a.device)
    return Factors(aligned(a), b, lora.scaling)
