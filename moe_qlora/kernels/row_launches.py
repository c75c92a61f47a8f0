"""How a layer's kernels over rows are cut and launched, worked out once for calls alike.

Each function here makes the `Launch` of one kernel, under a key of all that its constants, and the
compiled kernel behind it, depend on: sizes, strides, dtypes and the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from . import row_kernels
from .launch import Launch
from .limits import cdiv

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}

# How many rows and columns a program takes at a time, measured on an H200 with the sizes of
# Qwen3-30B-A3B. One stage: with loads ahead a layer is 3 % slower, and 64 rows by 4 warps are a
# race: Hopper's product goes on while its tile, which is stored as well, is overwritten, since
# Triton 3.6 gives such a load a buffer too few (up to 21 % off).
_ROWS = 16
_COPY = {"BM": _ROWS, "BK": 64, "num_warps": 2, "num_stages": 1}
_COPY_MANY = {"BM": _ROWS, "BK": 128, "num_warps": 2, "num_stages": 1}
"""For `_MANY` tiles and more: 0.26 ms at 16,384 tokens, not 0.31; 0.08 at 4,096, not 0.07."""
_COPY_FEW = {"BM": _ROWS, "num_warps": 4, "num_stages": 1}
_GATE_FEW = {"BM": _ROWS, "num_warps": 8, "num_stages": 1}
"""For tiles of 16, where a program's number of steps is what takes the time: a token is copied in
0.011 ms by 512 columns a step, in 0.034 by 64."""
_FACTOR_PART = 8192
"""Numbers of a factor in such a step: 16 KiB of the 99 that most cards have."""
_STEPS = 8
"""Most steps that such a program unrolls, so that its code stays short. With a bias beside them,
which backward multiplies alone, copied rows would not stay in registers."""
_COPY_LONG = {"BK": 64, "num_warps": 4, "num_stages": 1}
"""For rows of over 4,096, in whole tiles: DeepSeek-V3's 7,168 take 0.99 ms instead of 1.10."""
_PRODUCTS = {"BK": 64, "num_warps": 4, "num_stages": 2}
"""For whole tiles that are not copied, only multiplied: 0.02 ms at 4,096 tokens, 0.28 for
DeepSeek-V3 at 16,384, where 16 rows a program take 0.05 and 0.53."""
_MANY = 1024

_GATE = {"BM": _ROWS, "BI": 128, "num_warps": 4, "num_stages": 1}
_GATE_REORDERS = {"BM": _ROWS, "BI": 256, "num_warps": 4, "num_stages": 1}
_GATE_BACKWARD = {"BM": 32, "BI": 64, "num_warps": 4, "num_stages": 1}
_GATE_BACKWARD_FEW = {"BM": _ROWS, "BI": 64, "num_warps": 2, "num_stages": 1}
# H200, Qwen3-30B-A3B's four at 4,096 and 16,384 tokens; ranks over 32 would not fit into the 99 KiB
# of most cards.
_OUTER = {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
_OUTER_HIGH_RANK = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}


def _unrolled(size: int, block: int, tile: int) -> int:
    """Return how many steps are unrolled, each step's loads ahead of the step before: all or 1."""
    steps = cdiv(size, block)
    return steps if tile == _ROWS and steps <= _STEPS else 1


class Gate(NamedTuple):
    """h = (clamp(up, -limit, limit) + shift) act(min(gate, limit)), or act(pre) where not gated."""

    act: str  # Key of `ACTS`; "silu" is z sigmoid(alpha z)
    gated: bool = True  # Whether pre holds gate and up
    interleaved: bool = False  # Whether gate and up alternate, else gate is the first half
    limit: float | None = None  # Clamp, None without one
    alpha: float = 1.0  # Of silu
    shift: float = 0.0  # Added to up


def numbers(gate: Gate) -> tuple[float, float, float]:
    """Return a gate's numbers, in the order in which kernels take them."""
    return gate.limit or 0.0, gate.alpha, gate.shift


def _gate_flags(gate: Gate) -> dict[str, int | bool]:
    return {
        "ACT": ACTS[gate.act],
        "GATED": gate.gated,
        "INTERLEAVED": gate.gated and gate.interleaved,
        "LIMITED": gate.limit is not None,
    }


@lru_cache(maxsize=256)
def spread(
    experts: int, total1: int, total2: int, ranks: tuple[int, ...],
    kinds: tuple[torch.dtype, ...], device: int,
) -> Launch:  # fmt: skip
    """Both lora_B, experts first; totals are those of one expert's factors."""
    return Launch(
        row_kernels.spread_kernel, (cdiv(total1, 64) + cdiv(total2, 64), cdiv(experts, 64)),
        RANK1=ranks[0], PADDED1=ranks[1], RANK2=ranks[2], PADDED2=ranks[3], E=experts,
        BQ=64, BE=64,
    )  # fmt: skip


@lru_cache(maxsize=256)
def gate(
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int, reorders: bool,
    dtype: torch.dtype, bias: torch.dtype | None, device: int,
) -> Launch:  # fmt: skip
    """The gate, and the second factor's product beside it; `reorders`: for registers' order."""
    cut = _GATE_REORDERS if reorders else _GATE
    if tile == _ROWS:
        cut = {"BI": min(256, _FACTOR_PART // max(rank, 16)), **_GATE_FEW}
    return Launch(
        row_kernels.gate_kernel, (tiles, tile // cut["BM"]),
        I=size, STRIDE=stride, RANK=rank, REORDERS=reorders, BIASED=bias is not None,
        STEPS=_unrolled(size, cut["BI"], tile), **_gate_flags(gate), **cut,
    )  # fmt: skip


@lru_cache(maxsize=256)
def copy(
    size: int, stride: int, rank: int, over_rows: bool, top_k: int, tile: int, tiles: int,
    dtype: torch.dtype, bias: torch.dtype | None, device: int,
) -> Launch:  # fmt: skip
    """The tokens' rows, and the first factor's product beside them; stride 0: that alone."""
    cut = _COPY_MANY if tiles >= _MANY else _COPY
    if stride == 0 and tile > _ROWS:
        cut = {"BM": tile, **_PRODUCTS}
    elif tile == _ROWS:
        cut = {"BK": min(512, _FACTOR_PART // max(rank, 16)), **_COPY_FEW}
    elif size > 4096:
        cut = {"BM": tile, **_COPY_LONG}
    return Launch(
        row_kernels.copy_kernel, (tiles, tile // cut["BM"]),
        K=size, STRIDE=stride, TOP_K=top_k, RANK=rank, OVER=over_rows, BIASED=bias is not None,
        STEPS=1 if bias is not None else _unrolled(size, cut["BK"], tile), **cut,
    )  # fmt: skip


@lru_cache(maxsize=256)
def to_tokens(
    tokens: int, first: int, end: int, size: int, top_k: int, experts: int, partial: bool,
    dtype: torch.dtype, kinds: tuple[torch.dtype | None, ...], device: int,
) -> Launch:  # fmt: skip
    """Rows summed to tokens; kinds: dtypes of weights, index and bias."""
    width = end - first
    block = min(triton.next_power_of_2(width), 1024)
    return Launch(
        row_kernels.sum_kernel, (tokens, cdiv(width, block)),
        N=width, TOP_K=top_k, E=experts, WEIGHTED=kinds[0] is not None,
        BIASED=kinds[2] is not None, PARTIAL=partial, BT=1, BN=block, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=256)
def gate_backward(
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int, keeps: bool,
    dtype: torch.dtype, kinds: tuple[torch.dtype | None, ...], device: int,
) -> Launch:  # fmt: skip
    """Back through the gate; kinds: dtypes of the weights and both biases."""
    cut = _GATE_BACKWARD_FEW if tile == _ROWS else _GATE_BACKWARD
    return Launch(
        row_kernels.gate_backward_kernel, (tiles, tile // cut["BM"]),
        I=size, STRIDE=stride, RANK=rank, BIASED=kinds[1] is not None, DOTS=kinds[2] is not None,
        KEEPS=keeps, **_gate_flags(gate), **cut,
    )  # fmt: skip


@lru_cache(maxsize=256)
def outer(
    size: int, rank: int, small: int, big: int, real: int, experts: int, top_k: int,
    gathers: bool, over: bool, kinds: tuple[torch.dtype | None, ...], device: int,
) -> Launch:  # fmt: skip
    """A factor's gradient, experts first; kinds: dtypes of rows, gradient and weights."""
    cut = _OUTER if rank <= 32 else _OUTER_HIGH_RANK
    strides = (real, 1) if over else (1, size)
    return Launch(
        row_kernels.outer_kernel, (cdiv(size, cut["BN"]), experts),
        SMALL=small, BIG=big, SE=real * size, SN=strides[0], SJ=strides[1],
        N=size, RANK=rank, REAL=real, TOP_K=top_k, GATHERS=gathers,
        WEIGHTED=kinds[2] is not None, **cut,
    )  # fmt: skip


@lru_cache(maxsize=256)
def interleave(experts: int, total: int, dtype: torch.dtype, device: int) -> Launch:
    """A gradient of lora_B, experts last; total is that of one expert's factor."""
    return Launch(
        row_kernels.interleave_kernel, (cdiv(total, 64), cdiv(experts, 64)), E=experts,
        BQ=64, BE=64,
    )  # fmt: skip
