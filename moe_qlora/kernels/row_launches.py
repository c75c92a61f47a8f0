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

# 16 rows by 2 warps: 0.051 ms for Qwen3-30B-A3B's gate at 4,096 tokens, 0.067 with 64 rows by 4,
# and 0.90 against 1.15 for Mixtral-8x7B's at 16,384 (H200). One stage: with loads ahead a layer is
# 3 % slower, and 64 rows by 4 are a race: Hopper's product goes on while its tile, which is stored
# as well, is overwritten, since Triton 3.6 gives such a load a buffer too few (up to 21 % off).
_ROWS = 16
_COPY = {"BM": _ROWS, "BK": 64, "num_warps": 2, "num_stages": 1}
_COPY_LONG = {"BK": 64, "num_warps": 4, "num_stages": 1}
"""For rows of over 4,096, in whole tiles: DeepSeek-V3's 7,168 take 0.99 ms instead of 1.10."""

_GATE = {"BM": _ROWS, "BI": 64, "num_warps": 2, "num_stages": 1}
# H200, the five shapes of NOTES.md: wide where rows are read, narrow where a gate is computed.
_OUTER = {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 2}
_OUTER_GATES = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}


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
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int, dtype: torch.dtype,
    bias: torch.dtype | None, device: int,
) -> Launch:  # fmt: skip
    """The gate, and the second factor's product beside it."""
    return Launch(
        row_kernels.gate_kernel, (tiles, tile // _ROWS),
        I=size, STRIDE=stride, RANK=rank, BIASED=bias is not None, **_gate_flags(gate), **_GATE,
    )  # fmt: skip


@lru_cache(maxsize=256)
def copy(
    size: int, stride: int, rank: int, over_rows: bool, top_k: int, tile: int, tiles: int,
    dtype: torch.dtype, bias: torch.dtype | None, device: int,
) -> Launch:  # fmt: skip
    """The tokens' rows, and the first factor's product beside them."""
    cut = _COPY if size <= 4096 else {"BM": tile, **_COPY_LONG}
    return Launch(
        row_kernels.copy_kernel, (tiles, tile // cut["BM"]),
        K=size, STRIDE=stride, TOP_K=top_k, RANK=rank, OVER=over_rows, BIASED=bias is not None,
        **cut,
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
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int, dtype: torch.dtype,
    kinds: tuple[torch.dtype | None, ...], device: int,
) -> Launch:  # fmt: skip
    """Back through the gate; kinds: dtypes of the weights and both biases."""
    return Launch(
        row_kernels.gate_backward_kernel, (tiles, tile // _ROWS),
        I=size, STRIDE=stride, RANK=rank, BIASED=kinds[1] is not None, DOTS=kinds[2] is not None,
        **_gate_flags(gate), **_GATE,
    )  # fmt: skip


@lru_cache(maxsize=256)
def outer(
    gate: Gate, size: int, rank: int, small: int, big: int, real: int, experts: int, top_k: int,
    gathers: bool, gates: bool, over: bool, kinds: tuple[torch.dtype | None, ...], device: int,
) -> Launch:  # fmt: skip
    """A factor's gradient; kinds: dtypes of rows, gradient, weights and bias."""
    cut = _OUTER_GATES if gates else _OUTER
    strides = (1, real * experts, experts) if over else (real * size, 1, size)
    return Launch(
        row_kernels.outer_kernel, (cdiv(size, cut["BN"]), experts),
        SMALL=small, BIG=big, SE=strides[0], SN=strides[1], SJ=strides[2],
        N=size, RANK=rank, REAL=real, TOP_K=top_k, GATHERS=gathers,
        WEIGHTED=kinds[2] is not None, GATES=gates, BIASED=kinds[3] is not None,
        **_gate_flags(gate), **cut,
    )  # fmt: skip
