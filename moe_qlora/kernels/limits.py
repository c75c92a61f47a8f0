"""The numbers and size rules that decide which kernel computes what. Standard library only.

Measured on an H200 with gate_up of Qwen3-30B-A3B, unless it says otherwise.
"""

# Rows an expert, on average, up to which the quantized matmul beats dequantizing. At 256 rows: 0.69
# ms against 0.73 forward, 0.76 against 0.75 backward; on Hopper 0.60 and 0.66. At 512 rows Hopper's
# ties with a dequantize + GEMM, which is 20 % slower inside a step (power limit). Where one
# dequantized weight serves two products, the first limit holds on Hopper too (1.26 ms, 1.22).
ROWS_ON_QUANTIZED, ROWS_ON_QUANTIZED_HOPPER = 256, 512
# Rows an expert between which the rs kernel (weights in registers, Hopper) is chosen in forward: at
# 128 rows 0.30 ms, through shared memory 0.32; at 256 0.44 and 0.52; at 1,024 1.35, torch's product
# of dequantized weights alone 1.31.
ROWS_IN_REGISTERS = 128, 1024
MAX_LORA_RANK = 128  # Highest rank of an adapter
MAX_EXPERTS = 4094  # Their counts, and two more, are summed up at once in sorting
TILE = 64  # Most rows in a tile, except in the quantized matmul
WIDE_TILE = 128  # Rows in its tiles where experts have many: each tile decodes anew
WIDEST_TILE = 256  # Rows in a tile of the rs kernel
# Largest weight that the projection path dequantizes at once; larger ones go expert by expert. A
# bf16 gate_up of Mixtral-8x7B is 1.75 GiB.
DEQUANTIZED_WEIGHT_BYTES = 2 << 30
GROUP = 8  # Sizes are whole groups of this many: strides of 16 bytes for 16-bit elements
WORKSPACE_PART = 8  # The workspace's cap is the device memory divided by this, unless one is set
ORDER = 4, 32  # The rs kernel's columns: pair (g, i) of 4 x 32, of each 256, comes at (i, g)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(rank: int) -> int:
    """Round a rank up to a power of two of at least 16, as matrix units need it."""
    return max(16, 1 << (rank - 1).bit_length())


def supports_fused(experts: int, sizes: tuple[int, ...], blocksize: int) -> bool:
    """Whether the fused layer supports a weight of these rows and columns (block size 0: int8)."""
    blocks = blocksize == 0 or (blocksize >= 8 and blocksize & (blocksize - 1) == 0)
    return blocks and all(size % GROUP == 0 for size in sizes) and experts <= MAX_EXPERTS


def supports_quantized(columns: int, blocksize: int) -> bool:
    """Whether blocks lie within rows of `columns`, as the quantized matmul needs (0: int8)."""
    return blocksize == 0 or (blocksize % 32 == 0 and columns % blocksize == 0)


def prefers_quantized(rows: int, experts: int, *, hopper: bool = False) -> bool:
    """Whether the rows of all experts are few enough for the quantized matmul.

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
    """Return upper bounds of the tiles of `tile`, `WIDE_TILE` and `WIDEST_TILE` rows.

    The last two are 0 where `tile` is a small one.
    """
    most = min(experts, count)
    first, wide, widest = (count // rows + most for rows in (tile, WIDE_TILE, WIDEST_TILE))
    return (first, wide, widest) if tile == TILE else (first, 0, 0)


def wide_tile(rows: int, experts: int, tile: int, *, least: int = 4 * TILE) -> int:
    """Return `tile` where experts have a third of `least` rows and more, else `tile_rows`."""
    own = tile_rows(rows, experts)
    return tile if own == TILE and 3 * rows > least * experts else own


def row_stride(width: int, itemsize: int, *, quantized: bool = False) -> int:
    """Return the elements from row to row: whole lines, if quantized or 1.3 % more at most."""
    # The quantized matmul copies lines; by them torch's is 0.8 % faster for Mixtral-8x7B's sizes.
    line = 128 // itemsize
    whole = cdiv(width, line) * line
    return whole if quantized or 80 * (whole - width) <= width else width
