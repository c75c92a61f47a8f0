"""LoRA factors as PEFT stores them, as the fused layer's kernels read them, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .lang import tl, triton
from .launch import Geometry, aligned, launcher
from .limits import cdiv, padded
from .routing import Routing
from .streams import SecondStream

# Rows and columns of a program's step: the quickest of four on an H200 for
# Qwen3-30B-A3B at 4,096 and 16,384 tokens; ranks over 32 would not fit into the 99 KiB of most
# cards.
_GRAD = {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
_GRAD_HIGH_RANK = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
_GRAD_GATHERED = {"BM": 32, "BN": 128, "num_warps": 4, "num_stages": 3}
"""Of tokens' rows, up to rank 32: 98 us where `_GRAD` takes 137 (16,384 tokens, H100)."""


class Lora(NamedTuple):
    """One projection's factors, as PEFT stores them."""

    a: Tensor  # `(E r, in)`, expert slowest
    b: Tensor  # `(out, r E)`, expert fastest
    scaling: float


class Factors(NamedTuple):
    """LoRA factors as the kernels read them: a `(E, r, in)`, b `(E, out, r)`, r padded."""

    a: Tensor
    b: Tensor  # Contiguous, or a view of PEFT's parameter (`pad_factors`)
    scaling: float

    @property
    def rank(self) -> int:
        """r, padded."""
        return self.a.shape[1]


def pad_factors(
    loras: Sequence[Lora | None],
    experts: int,
    dtype: torch.dtype,
    second: SecondStream,
    as_stored: tuple[bool, bool] = (False, False),
) -> list[Factors | None]:
    """Return both projections' factors as the matmuls read them, ranks padded by zeros.

    Where `as_stored`, and rank and dtype allow it, b stays where PEFT stores it, as a view of other
    strides, which only the quantized matmul reads. Else it is copied on the second stream.
    """
    factors: list[Factors | None] = []
    pairs: list[tuple[Lora, Factors]] = []  # Those whose b is copied
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
    sizes = experts, total1, total2, ranks
    with second.beside(plain1, plain2):
        _launch_expert_major(sizes, plain1, plain2, f1.b, f2.b, total1, total2)
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
    rank = lora.a.shape[0] // experts
    wide = padded(rank)
    a = lora.a.to(dtype).contiguous().view(experts, rank, lora.a.shape[1])
    if wide != rank:
        a = F.pad(a, (0, 0, 0, wide - rank))
    if b is None:
        b = torch.empty(experts, lora.b.shape[0], wide, dtype=dtype, device=a.device)
    return Factors(aligned(a), b, lora.scaling)


def factor_grad(
    like: Tensor, small: Tensor, stride: int, big: Tensor, routing: Routing, size: int,
    second: SecondStream, *, rank: int | None = None, gathers: bool = False, over: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of a factor, like `like`, from `(R, r)` rows and `(R, size)` ones.

    It is computed on the second stream.

    small: rows `stride` apart, their first `rank` columns (None: all); big: sorted rows, or
    tokens' where `gathers`; over: the factor is B, expert fastest.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    real = (like.shape[1] if over else like.shape[0]) // routing.experts
    # Written at once, 2 bytes at a time, B's gradients take 1.3 to 1.7 times as long.
    first = torch.empty_like(out) if over else out
    with second.beside(small, big, first):
        _launch_grad(
            (size, rank or stride, stride, big.stride(0), real, routing.experts, routing.top_k,
             gathers, over),
            small, big, routing.order, routing.expert_offsets, first,
        )  # fmt: skip
        if over:
            total = out.numel() // routing.experts
            _launch_expert_minor((routing.experts, total), first, out, total)
    return out


@triton.jit
def expert_major_kernel(
    b1, b2, out1, out2, total1, total2, RANK1: tl.constexpr, PADDED1: tl.constexpr,
    RANK2: tl.constexpr, PADDED2: tl.constexpr, E: tl.constexpr,
    BQ: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Both lora_B (N, RANK E), expert fastest -> (E, N, PADDED), zeros beyond RANK."""
    pid = tl.program_id(0)
    first = tl.cdiv(total1, BQ)
    if pid < first:
        _expert_major(b1, out1, total1, pid, RANK1, PADDED1, E, BQ, BE)
    else:
        _expert_major(b2, out2, total2, pid - first, RANK2, PADDED2, E, BQ, BE)


@triton.jit
def _expert_major(
    b, out, total, pid, RANK: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr,
    BQ: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    q = pid * BQ + tl.arange(0, BQ)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n, j = q // PADDED, q % PADDED
    ok = (q < total)[:, None] & (e < E)[None, :]
    spot = (n * RANK + j)[:, None] * E + e[None, :]
    value = tl.load(b + spot, mask=ok & (j < RANK)[:, None], other=0.0)
    to = e.to(tl.int64)[None, :] * total + q[:, None]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def factor_grad_kernel(
    small, big, order, expert_offsets, out,
    SMALL: tl.constexpr, BIG: tl.constexpr, SE: tl.constexpr, SN: tl.constexpr, SJ: tl.constexpr,
    N: tl.constexpr, RANK: tl.constexpr, REAL: tl.constexpr, TOP_K: tl.constexpr,
    GATHERS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[e, n, j] = sum over e's rows i of big[i, n] small[i, j].

    big is (R, N) rows, or rows of tokens (GATHERS). SMALL and BIG are strides of rows, SE, SN and
    SJ those of out; only j < REAL is written.
    """
    expert = tl.program_id(1)
    low, high = tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, RANK)
    total = tl.zeros([BN, RANK], tl.float32)
    for start in range(low, high, BM):
        rows = (start + tl.arange(0, BM)).to(tl.int64)
        live = rows < high
        ok = live[:, None] & (n < N)[None, :]
        s = tl.load(small + rows[:, None] * SMALL + j[None, :], mask=live[:, None], other=0.0)
        source = rows
        if GATHERS:
            source = (tl.load(order + rows, mask=live, other=0) // TOP_K).to(tl.int64)
        value = tl.load(big + source[:, None] * BIG + n[None, :], mask=ok, other=0.0)
        total = tl.dot(tl.trans(value), s, total, input_precision="ieee")
    to = out + expert.to(tl.int64) * SE + n[:, None].to(tl.int64) * SN + j[None, :] * SJ
    ok = (n < N)[:, None] & (j < REAL)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def expert_minor_kernel(
    matrices, out, total, E: tl.constexpr, BQ: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """(E, total) -> (total, E): a gradient of lora_B, experts first, as PEFT has it."""
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    ok = (q < total)[:, None] & (e < E)[None, :]
    value = tl.load(matrices + e.to(tl.int64)[None, :] * total + q[:, None], mask=ok, other=0.0)
    tl.store(out + q.to(tl.int64)[:, None] * E + e[None, :], value, mask=ok)


@launcher(expert_major_kernel)
def _launch_expert_major(
    experts: int, total1: int, total2: int, ranks: tuple[int, ...]
) -> Geometry:
    return (cdiv(total1, 64) + cdiv(total2, 64), cdiv(experts, 64)), {
        "RANK1": ranks[0], "PADDED1": ranks[1], "RANK2": ranks[2], "PADDED2": ranks[3],
        "E": experts, "BQ": 64, "BE": 64,
    }  # fmt: skip


@launcher(factor_grad_kernel)
def _launch_grad(
    size: int, rank: int, small: int, big: int, real: int, experts: int, top_k: int,
    gathers: bool, over: bool,
) -> Geometry:  # fmt: skip
    cut = _GRAD_HIGH_RANK if rank > 32 else _GRAD_GATHERED if gathers else _GRAD
    strides = (real, 1) if over else (1, size)
    return (cdiv(size, cut["BN"]), experts), {
        "SMALL": small, "BIG": big, "SE": real * size, "SN": strides[0], "SJ": strides[1],
        "N": size, "RANK": rank, "REAL": real, "TOP_K": top_k, "GATHERS": gathers, **cut,
    }  # fmt: skip


@launcher(expert_minor_kernel)
def _launch_expert_minor(experts: int, total: int) -> Geometry:
    return (cdiv(total, 64), cdiv(experts, 64)), {"E": experts, "BQ": 64, "BE": 64}
