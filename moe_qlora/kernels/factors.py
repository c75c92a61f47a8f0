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
    b: Tensor  # Contiguous, or a view of what PEFT stores (`pad_factors`)
    scaling: float

    @property
    def rank(self) -> int:
        """r, padded."""
        return self.a.shape[1]


def pad_factors(
    loras: Sequence[Lora | None],
    experts: int,
    dtype: torch.dtype,
    as_stored: tuple[bool, bool] = (False, False),
) -> list[Factors | None]:
    """Return both projections' factors as the matmuls read them, ranks padded by zeros.

    Those of `as_stored` leave b where PEFT stores it, if its rank and dtype allow that, as a view
    of other strides: what the quantized matmul takes, and the other kernels do not.
    """
    factors: list[Factors | None] = []
    pairs: list[tuple[Lora, Factors]] = []  # Those whose b is to be laid out
    for lora, stays in zip(loras, as_stored, strict=True):
        if lora is None:
            factors.append(None)
            continue
        b = _stored(lora, experts, dtype) if stays else None
        f = _with_room(lora, b, experts, dtype)
        factors.append(f)
        if b is None:
            pairs.append((lora, f))
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


def _stored(lora: Lora, experts: int, dtype: torch.dtype) -> Tensor | None:
    """Return b `(E, out, r)` as a view of `lora.b`, None where it needs a copy."""
    out, rank = lora.b.shape[0], lora.b.shape[1] // experts
    # Kernels count the numbers of such a view in 32 bits.
    suits = rank == padded(rank) and lora.b.dtype == dtype and lora.b.numel() < 1 << 31
    if not suits or not lora.b.is_contiguous():
        return None
    return aligned(lora.b).view(out, rank, experts).permute(2, 0, 1)


def _with_room(lora: Lora, b: Tensor | None, experts: int, dtype: torch.dtype) -> Factors:
    """Return `Factors` with this b, or one that is room only."""
    rank = lora.a.shape[0] // experts
    wide = padded(rank)
    a = lora.a.to(dtype).contiguous().view(experts, rank, lora.a.shape[1])
    if wide != rank:
        a = F.pad(a, (0, 0, 0, wide - rank))
    if b is None:
        b = torch.empty(experts, lora.b.shape[0], wide, dtype=dtype, device=a.device)
    return Factors(aligned(a), b, lora.scaling)
