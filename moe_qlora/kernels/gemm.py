"""Grouped product of some experts' rows: what torch's own cannot do, since it takes all of them.

Used where a decoded stack does not fit the scratch, which then holds a chunk of experts at a time:
where an expert's rows begin is known on the device alone, so a product over a chunk has to find its
rows there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 128
_BLOCK_N, _BLOCK_K, _WARPS, _STAGES = 128, 64, 8, 3


@triton.jit
def gemm_kernel(
    x, w, y, tiles, bounds, first, last, w_se, w_sk, w_sn,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[i] = x[i] w[e - first] for the rows i of each expert e in [first, last).

    x (R, K), w (last - first, K, N) of any strides, y (R, N). Program 0: N; 1: tile of rows.
    """
    pid = tl.program_id(1)
    expert = tl.load(tiles + 2 * pid)
    if (expert < first) | (expert >= last):
        return
    rows = tl.load(tiles + 2 * pid + 1) + tl.arange(0, BM)
    live = rows < tl.load(bounds + expert + 1)
    rows = rows.to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    k = tl.arange(0, BK)
    left = x + rows[:, None] * K + k[None, :]
    right = w + (expert - first).to(tl.int64) * w_se + k[:, None] * w_sk + n[None, :] * w_sn
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        ok = k < K - start
        a = tl.load(left, mask=live[:, None] & ok[None, :], other=0.0)
        b = tl.load(right, mask=ok[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK
        right += BK * w_sk
    to = y + rows[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


def multiply(x: Tensor, w: Tensor, y: Tensor, tiles: Tensor, bounds: Tensor, first: int) -> None:
    """y[i] = x[i] w[e - first] for the rows of the experts [first, first + len(w)).

    Args:
        x: `(R, K)` contiguous.
        w: `(E', K, N)`, any strides.
        y: `(R, N)` contiguous; other rows stay as they are.
        tiles: `(n, 2)` int32 with `TILE` rows a tile, as `layer.Routing.tiles`.
        bounds: `(E + 1,)` int32.
        first: First expert.
    """
    n = w.shape[2]
    gemm_kernel[(triton.cdiv(n, _BLOCK_N), tiles.shape[0])](
        x, w, y, tiles, bounds, first, first + w.shape[0], *w.stride(),
        N=n, K=x.shape[1], BM=TILE, BN=_BLOCK_N, BK=_BLOCK_K, num_warps=_WARPS,
        num_stages=_STAGES,
    )  # fmt: skip
