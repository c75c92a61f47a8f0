"""The numbers that decide which kernel computes what: read by kernels, experts and memory plans.

Standard library only, so that a plan without torch or Triton takes them from here too.
"""

from __future__ import annotations

ROWS_ON_QUANTIZED, ROWS_ON_QUANTIZED_HOPPER = 256, 512
"""Rows an expert, on average, up to which the quantized matmul beats dequantizing (H200, gate_up of
Qwen3-30B-A3B: at 256 rows 0.69 against 0.73 ms forward and 0.76 against 0.75 backward; on Hopper's
own kernel 0.60 and 0.66, before it was made a tenth quicker; at 512 about as much as dequantizing
by itself, which within a step takes a fifth more, for want of power). Where a dequantized weight
serves two products, the first is the limit on Hopper as well: at 256 rows 1.26 ms on that kernel,
1.22 for dequantizing and both products."""

MAX_LORA_RANK = 128
"""Most ranks of all active adapters of one projection together that the fused layer takes."""

MAX_EXPERTS = 4094
"""Most experts that top-k assignments are sorted by: their counts, and two more, are summed up at
once."""

TILE = 64
"""Most rows in a tile, but for the quantized matmul."""

WIDE_TILE = 128
"""Rows in a tile of the quantized matmul, where experts have many: each tile dequantizes anew."""

LINE = 128
"""Bytes that the memory of a GPU is best read in."""

DEQUANTIZED_WEIGHT_BYTES = 2 << 30
"""Largest weight that the projection path dequantizes at once; larger ones go expert by expert.
A bf16 gate_up of Mixtral-8x7B is 1.75 GiB."""

WORKSPACE_PART = 8
"""Without a cap of the user's, the workspace takes up to this part of the device memory."""


def padded(rank: int) -> int:
    """Round a rank up to what matrix units want: a power of two of at least 16."""
    return max(16, 1 << (rank - 1).bit_length())
