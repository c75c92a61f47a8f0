"""Flash attention over segments in plain torch, for tests on a CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_qlora.train import segments

SEEN: list[int] = []
"""How many rows of one length the segments of each forward were, or 0, since `use`."""


def _scores(q: Tensor, k: Tensor, offsets: Tensor, window: int, scale: float) -> Tensor:
    """Return scores `(heads, L, L)`, -inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    numbers = torch.arange(len(q))
    ids = (numbers[:, None] >= offsets[1:]).sum(1)
    seen = (ids[:, None] == ids) & (numbers[:, None] >= numbers)
    if window >= 0:
        seen &= numbers[:, None] - numbers <= window
    return scores.masked_fill(~seen, -torch.inf)


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention `(L, heads, D)` and its log-sum-exp `(heads, L)`."""
    longest, rows = sizes.tolist()
    assert int((offsets[1:] - offsets[:-1]).max()) <= longest
    SEEN.append(rows)
    scores = _scores(q, k, offsets, window, scale)
    lse = scores.logsumexp(-1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v.float())
    return out.to(q.dtype).contiguous(), lse


def kernel_backward(
    grad: Tensor, saved: Sequence[Tensor], offsets: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients, from the given log-sum-exp, as the kernel computes them."""
    q, k, v, out, lse = saved
    share = q.shape[1] // k.shape[1]
    p = (_scores(q, k, offsets, window, scale) - lse[..., None]).exp()
    wide_v, wide_k = (x.float().repeat_interleave(share, 1) for x in (v, k))
    of_p = torch.einsum("qhd,khd->hqk", grad.float(), wide_v)
    inner = (grad.float() * out.float()).sum(-1).t()[..., None]
    of_scores = p * (of_p - inner) * scale
    dq = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
    dk = torch.einsum("hqk,qhd->khd", of_scores, q.float())
    dv = torch.einsum("hqk,qhd->khd", p, grad.float())
    dk, dv = (x.unflatten(1, (k.shape[1], share)).sum(2) for x in (dk, dv))
    dq, dk, dv = (x.to(like.dtype).contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv


def use(monkeypatch: Any) -> None:
    """Let segments be told apart by offsets on the CPU and in 32 bit, as on CUDA in 16."""
    SEEN.clear()
    monkeypatch.setattr(segments, "kernel_forward", kernel_forward)
    monkeypatch.setattr(segments, "kernel_backward", kernel_backward)
    monkeypatch.setattr(segments, "DTYPES", (*segments.DTYPES, torch.float32))
    monkeypatch.setattr(segments, "has_kernels", lambda device, dtype: True)
