"""The numbers and size rules that decide which kernel computes what.

Kernels, experts and memory plans read them here. Standard library only.
"""

from __future__ import annotations

ROWS_ON_QUANTIZED, ROWS_ON_QUANTIZED_HOPPER = 256, 512
"""Rows an expert, on average, up to which the quantized matmul beats dequantizing. H200, gate_up of
Qwen3-30B-A3B at 256 rows: 0.69 ms against 0.73 forward, 0.76 against 0.75 backward; with Hopper's
own kernel 0.60 and 0.66. At 512 rows Hopper's ties with a standalone dequantize + GEMM, which runs
20 % slower inside a step (power limit). Where one dequantized weight serves two products, the first
limit holds on Hopper as well: at 256 rows 1.26 ms on that kernel, 1.22 for dequantizing and both
products."""

MAX_LORA_RANK = 128
"""Highest sum of the active adapters' ranks on one projection that the fused layer supports."""

MAX_EXPERTS = 4094
"""Most experts that top-k assignments are sorted by: their counts, and two more, are summed up at
once."""

TILE = 64
"""Most rows in a tile, except in the quantized matmul."""

WIDE_TILE = 128
"""Rows in a tile of the quantized matmul where experts have many: each tile decodes anew."""

WIDEST_TILE = 256
"""Rows in a tile of the rs kernel (weights in registers, Hopper)."""

ROWS_IN_REGISTERS = 128, 1024
"""Rows an expert, on average, between which the rs kernel is chosen in forward (H200,
gate_up of Qwen3-30B-A3B: at 128 rows 0.30 ms, through shared memory 0.32; at 256 0.44 and 0.52; at
1,024 1.35, torch's product of dequantized weights alone 1.31)."""

DEQUANTIZED_WEIGHT_BYTES = 2 << 30
"""Largest weight that the projection path dequantizes at once; larger ones go expert by expert.
A bf16 gate_up of Mixtral-8x7B is 1.75 GiB."""

GROUP = 8
"""Sizes are whole groups of this many: strides of 16 bytes for 16-bit elements."""

WORKSPACE_PART = 8
"""The workspace's cap is the device memory divided by this, unless the user sets one."""


ORDER = 4, 32
"""The rs kernel's order of columns: pair (g, i) of 4 x 32, of each 256 columns, comes at (i, g)."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(rank: int) -> int:
    """Round a rank up to a power of two of at least 16, as matrix units need it."""
    return max(16, 1 << (rank - 1).bit_length())


def supports_fused(experts: int, sizes: tuple[int, ...], blocksize: int) -> bool:
    """Whether the fused layer's kernels support a weight of these sizes (rows and columns).

    A 4-bit block is a power of two of at least 8 weights; `blocksize` is 0 for int8.
    """
    blocks = blocksize == 0 or (blocksize >= 8 and blocksize & (blocksize - 1) == 0)
    return blocks and all(size % GROUP == 0 for size in sizes) and experts <= MAX_EXPERTS


def supports_quantized(columns: int, blocksize: int) -> bool:
    """Whether the quantized matmul supports a weight: its blocks lie within rows of `columns`.

    `blocksize` is 0 for int8.
    """
    return blocksize == 0 or (blocksize % 32 == 0 and columns % blocksize == 0)


def prefers_quantized(rows: int, experts: int, *, hopper: bool = False) -> bool:
    """Whether so many rows, of all experts, are few enough for the quantized matmul.

    `hopper`: on Hopper's own kernel, where no second product would reuse the dequantized weight.
    """
    return rows <= (ROWS_ON_QUANTIZED_HOPPER if hopper else ROWS_ON_QUANTIZED) * experts


def dequantizes_whole(experts: int, in_features: int, out_features: int) -> bool:
    """Whether the projection path dequantizes all experts at once, for a grouped matmul."""
    whole = in_features % GROUP == 0 and out_features % GROUP == 0
    return whole and 2 * experts * in_features * out_features <= DEQUANTIZED_WEIGHT_BYTES


def tile_rows(count: int, experts: int) -> int:
    """Return the rows in a tile: few where experts have few, else room for most experts' rows."""
    return next((t for t in (16, 32) if 2 * t * experts >= 3 * count), TILE)


def tile_counts(count: int, experts: int, tile: int) -> tuple[int, int, int]:
    """Return the most tiles there can be of `tile`, of `WIDE_TILE` and of `WIDEST_TILE` rows.

    The last two are 0 where `tile` is a small one.
    """
    most = min(experts, count)
    wide = tile == TILE
    return (
        count // tile + most,
        count // WIDE_TILE + most if wide else 0,
        count // WIDEST_TILE + most if wide else 0,
    )


def wide_tile(rows: int, experts: int, tile: int, *, least: int = 4 * TILE) -> int:
    """Return `tile` where experts have a third of `least` rows and more, else `tile_rows`."""
    own = tile_rows(rows, experts)
    return tile if own == TILE and 3 * rows > least * experts else own


def row_stride(width: int, itemsize: int, *, quantized: bool = False) -> int:
    """Return the elements from row to row: whole lines, where rows are few or that is 1.3 % more.

    Memory is best read in lines of 128 bytes. So torch's grouped matmul is 0.8 % faster for
    Mixtral-8x7B (4,096 and 14,336 columns, and 16 of LoRA), and no faster for Qwen3-30B-A3B (2,048
    and 768); H200. The quantized matmul copies 128 bytes of a row at a time.
    """
    line = 128 // itemsize
    whole = cdiv(width, line) * line
    return whole if quantized or 80 * (whole - width) <= width else width
