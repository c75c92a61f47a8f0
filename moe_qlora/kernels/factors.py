"""LoRA factors as PEFT stores them, as the fused layer's kernels read them, and their gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .lang import aligned, launcher, tl, triton
from .limits import cdiv, padded
from .routing import Routing

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
    """LoRA factors of all experts: a `(E, r, in)`, b `(E, out, r)`; kernels read r padded."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r, padded for kernels."""
        return self.a.shape[1]


def pad_factors(
    loras: Sequence[Lora | None], experts: int, dtype: torch.dtype
) -> list[Factors | None]:
    """Return projections' factors as the matmuls read them, ranks padded by zeros."""
    factors: list[Factors | None] = []
    for lora in loras:
        if lora is None:
            factors.append(None)
            continue
        rank, out = lora.a.shape[0] // experts, lora.b.shape[0]
        wide = padded(rank)
        a = lora.a.to(dtype).contiguous().view(experts, rank, -1)
        if wide != rank:
            a = F.pad(a, (0, 0, 0, wide - rank))
        b = torch.empty(experts, out, wide, dtype=dtype, device=a.device)
        stored = aligned(lora.b.contiguous())
        launcher(expert_major_kernel, (cdiv(out * wide, 64), cdiv(experts, 64)), stored)(
            stored, b, out * wide, RANK=rank, PADDED=wide, E=experts, BQ=64, BE=64
        )
        factors.append(Factors(aligned(a), b, lora.scaling))
    return factors


def factor_grad(
    like: Tensor, small: Tensor, stride: int, big: Tensor, routing: Routing, size: int,
    *, rank: int | None = None, gathers: bool = False, over: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of a factor, like `like`, from `(R, r)` rows and `(R, size)` ones.

    small: rows `stride` apart, their first `rank` columns (None: all); big: sorted rows, or
    tokens' where `gathers`; over: the factor is B, expert fastest.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    real = (like.shape[1] if over else like.shape[0]) // routing.experts
    # Written at once, 2 bytes at a time, B's gradients take 1.3 to 1.7 times as long.
    first = torch.empty_like(out) if over else out
    rank = rank or stride
    cut = _GRAD_HIGH_RANK if rank > 32 else _GRAD_GATHERED if gathers else _GRAD
    strides = (real, 1) if over else (1, size)
    launcher(factor_grad_kernel, (cdiv(size, cut["BN"]), routing.experts), small)(
        small, big, routing.order, routing.expert_offsets, first,
        SMALL=stride, BIG=big.stride(0), SE=real * size, SN=strides[0], SJ=strides[1],
        N=size, RANK=rank, REAL=real, TOP_K=routing.top_k, GATHERS=gathers, **cut,
    )  # fmt: skip
    if over:
        total = out.numel() // routing.experts
        launcher(expert_minor_kernel, (cdiv(total, 64), cdiv(routing.experts, 64)), first)(
            first, out, total, E=routing.experts, BQ=64, BE=64
        )
    return out


@triton.jit
def expert_major_kernel(
    b, out, total, RANK: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr,
    BQ: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """lora_B (N, RANK E), expert fastest -> (E, N, PADDED), zeros beyond RANK."""
    q = tl.program_id(0) * BQ + tl.arange(0, BQ)
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
