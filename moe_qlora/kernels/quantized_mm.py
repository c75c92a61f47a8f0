"""The quantized matmul: grouped products on packed codes, for few rows an expert, both directions.

Where an expert has few rows, a layer is bound by reading its weights. The codes are read once
(0.516 bytes a weight), decoded in registers (a code's value times its block's absmax, rounded to 16
bits) and multiplied there, without the 2 bytes a weight that a dequantized one writes and reads.

One kernel serves both directions and both layouts: they differ only in whether the stored rows are
the output features or the contracted dimension.

Codes are looked up in a table in fp16 (11 bits; dequantizing uses fp32), so that about one weight
in 30 rounds to the neighbour of its dequantized value. On Hopper and for many rows
`quantized_mm_hopper.py` and `quantized_mm_rs.py` are exact, and faster.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import cards, workspace
from .grouped_mm import block_absmax
from .lang import launcher, tl, triton
from .limits import TILE, WIDE_TILE, cdiv, prefers_quantized, supports_quantized, wide_tile
from .routing import Routing
from .table import Kernel, Matmul
from .weights import TABLES


class Config(NamedTuple):
    """How the kernel is cut."""

    features: int  # Output features of a program, a multiple of 64
    step: int  # Features summed over in a step, a multiple of 64
    stages: int  # Steps loaded ahead
    warps: int  # Warps in a program


_CUT = Config(128, 64, 3, 4)
_OTHERS = {(False, 64): _CUT._replace(features=256), (True, 16): _CUT._replace(features=64)}
"""By direction (True: over stored rows) and tile, where not `_CUT`: the quickest on an H200 for
Qwen3-30B-A3B."""


def default(matmul: Matmul, tile: int) -> Config:
    """Return the cut for tiles of `tile` rows."""
    if tile >= TILE and not cards.of_index(matmul.packed.spec.device).runs_on:
        return _CUT._replace(warps=8)  # Operands lie in registers: four warps have too few of them
    return _OTHERS.get((not matmul.by_rows, tile), _CUT)


@cache
def lookup_asm(kind: str) -> str:
    """Return PTX: 4 bytes of codes ($4) to values of the high halves ($0, $1) and low ($2, $3).

    `prmt` picks 4 bytes out of 8 by 4 nibbles, so that 4 codes at a time look up one of the two
    bytes of their fp16 values: once among the codes below 8, once among the others, and the codes'
    high bits choose between the two.
    """
    values = torch.tensor(TABLES[kind], dtype=torch.float32).half()
    bits = [b & 0xFFFF for b in values.view(torch.int16).tolist()]

    def pool(plane: int, first: int) -> str:
        word = sum(((bits[first + i] >> (8 * plane)) & 255) << (8 * i) for i in range(4))
        return f"0x{word:08x}"

    lines = [
        ".reg .b32 s, h, m, a, b, x, y, p0, p1;",
        "and.b32 s, $4, 0x77777777;",
        "shr.u32 h, $4, 3;",
        "and.b32 h, h, 0x11111111;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.u32 s, s, 16;", "shr.u32 h, h, 16;"]
        lines.append("prmt.b32 m, 0x0000ff00, 0, h;")
        for plane in range(2):
            low, high = (pool(plane, 0), pool(plane, 4)), (pool(plane, 8), pool(plane, 12))
            lines += [
                f"mov.b32 a, {low[0]}; mov.b32 b, {low[1]}; prmt.b32 x, a, b, s;",
                f"mov.b32 a, {high[0]}; mov.b32 b, {high[1]}; prmt.b32 y, a, b, s;",
                f"lop3.b32 p{plane}, x, y, m, 0xd8;",
            ]
        lines += [f"prmt.b32 ${half}, p0, p1, 0x7351;", f"prmt.b32 ${2 + half}, p0, p1, 0x6240;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _halves(codes, table, ASM: tl.constexpr):
    """Bytes -> fp32 values of their high and of their low halves."""
    if len(ASM) > 0:
        high, low = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int32)
        high, low = tl.load(table + (wide >> 4)), tl.load(table + (wide & 15))
    return high.to(tl.float32), low.to(tl.float32)


@triton.jit
def absmax_kernel(
    absmax, table2, absmax2, offset, expert_offsets, out,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, NESTED: tl.constexpr,
    BR: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """A nested absmax (E, ROWS, BLOCKS) as fp32 (E, BLOCKS, ROWS), of the experts with rows."""
    expert = tl.program_id(2)
    if tl.load(expert_offsets + expert) == tl.load(expert_offsets + expert + 1):
        return
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    block = tl.program_id(1) * BB + tl.arange(0, BB)
    live = (row < ROWS)[:, None] & (block < BLOCKS)[None, :]
    first = expert.to(tl.int64) * (ROWS * BLOCKS)
    at = first + row[:, None] * BLOCKS + block[None, :]
    value = block_absmax(absmax, table2, absmax2, offset, at, live, NESTED)
    tl.store(out + first + block[None, :] * ROWS + row[:, None], value, mask=live)


@triton.jit
def _weights(
    codes, absmax, table, expert, row, col, stride_r, stride_b, like,
    ROWS: tl.constexpr, COLS: tl.constexpr, C: tl.constexpr, BLOCKSIZE: tl.constexpr,
    INT8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weights (R, C) of an expert: these rows, and C columns from `col` on, a multiple of C."""
    dtype = like.dtype.element_ty
    inside = row < ROWS
    if INT8:
        c = col + tl.arange(0, C)
        ok = inside[:, None] & (c < COLS)[None, :]
        spots = codes + expert * (ROWS * COLS) + row[:, None] * COLS + c[None, :]
        value = tl.load(spots, mask=ok, other=0).to(tl.float32)
        scale = tl.load(absmax + expert * ROWS + row, mask=inside, other=0.0)
        w = (value * scale[:, None] * 7.874015718698502e-3).to(dtype)
    else:
        half = tl.arange(0, C // 2)
        c = col // 2 + half
        ok = inside[:, None] & (c < COLS // 2)[None, :]
        spots = codes + expert * (ROWS * COLS // 2) + row[:, None] * (COLS // 2) + c[None, :]
        packed = tl.load(spots, mask=ok, other=0)
        BLOCKS: tl.constexpr = COLS // BLOCKSIZE
        block = col // BLOCKSIZE
        spots = expert * (ROWS * BLOCKS) + row * stride_r + block * stride_b
        if BLOCKSIZE < 64:  # all of the tile's blocks at once
            MANY: tl.constexpr = C // BLOCKSIZE
            more = tl.arange(0, MANY)
            live = inside[:, None] & (block + more < BLOCKS)[None, :]
            at = spots[:, None] + more[None, :] * stride_b
            each = tl.load(absmax + at, mask=live, other=0.0)[:, :, None]
            each = tl.broadcast_to(each, (each.shape[0], MANY, BLOCKSIZE // 2))
            scale = tl.reshape(each, (each.shape[0], C // 2))
        else:
            scale = tl.load(absmax + spots, mask=inside, other=0.0)[:, None]
        if C > BLOCKSIZE and BLOCKSIZE >= 64:  # the tile's second block
            more = inside & (block + 1 < BLOCKS)
            spots += stride_b
            second = tl.load(absmax + spots, mask=more, other=0.0)[:, None]
            scale = tl.where((half < BLOCKSIZE // 2)[None, :], scale, second)
        high, low = _halves(packed, table, ASM)
        # A byte's high half is the first of two neighbours.
        both = tl.join((high * scale).to(dtype), (low * scale).to(dtype))
        w = tl.reshape(both, (both.shape[0], C))
    return w


@triton.jit
def quantized_kernel(
    x, order, products, codes, absmax, table, factor, tiles, expert_offsets, y,
    stride_r, stride_b, n_first, n_end, factor_se, factor_sn, factor_sj,
    ROWS: tl.constexpr, COLS: tl.constexpr, STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    RANK: tl.constexpr, BACK: tl.constexpr, BLOCKSIZE: tl.constexpr, INT8: tl.constexpr,
    ASM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (R, n_end - n_first) = features [n_first, n_end) of x W^T, or of x W where BACK.

    x (R, K + RANK) in rows STRIDE apart, whose last RANK columns go with the factor (E, N, RANK);
    where TOP_K, row i is row order[i] // TOP_K of x (T, K), and its last columns are products (R,
    RANK). Codes of (E, ROWS, COLS). Program 0: features, in blocks; 1: tile of rows.
    """
    pid = tl.program_id(1)
    expert = tl.load(tiles + 2 * pid).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tiles + 2 * pid + 1) + tl.arange(0, BM)
    live = rows < tl.load(expert_offsets + expert + 1)
    rows = rows.to(tl.int64)
    K: tl.constexpr = ROWS if BACK else COLS
    first = n_first + tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    source = rows
    if TOP_K > 0:
        source = (tl.load(order + rows, mask=live, other=0) // TOP_K).to(tl.int64)
    left = x + source[:, None] * STRIDE + k[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(left + start, mask=live[:, None] & (start + k < K)[None, :], other=0.0)
        if BACK:
            w = _weights(
                codes, absmax, table, expert, start + k, first,
                stride_r, stride_b, x, ROWS, COLS, BN, BLOCKSIZE, INT8, ASM,
            )  # fmt: skip
            total = tl.dot(a, w, total, input_precision="ieee")
        else:
            w = _weights(
                codes, absmax, table, expert, n, start,
                stride_r, stride_b, x, ROWS, COLS, BK, BLOCKSIZE, INT8, ASM,
            )  # fmt: skip
            total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    inside = n < n_end
    if RANK > 0:
        j = tl.arange(0, RANK)
        spots = factor + expert * factor_se + n[None, :] * factor_sn + j[:, None] * factor_sj
        f = tl.load(spots, mask=inside[None, :], other=0.0)
        spots = x + rows[:, None] * STRIDE + K + j[None, :]
        if TOP_K > 0:
            spots = products + rows[:, None] * RANK + j[None, :]
        tail = tl.load(spots, mask=live[:, None], other=0.0)
        total = tl.dot(tail, f, total, input_precision="ieee")
    to = y + rows[:, None] * (n_end - n_first) + (n - n_first)[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


def supports(matmul: Matmul) -> bool:
    """Whether blocks lie within rows, and rows are few enough."""
    spec = matmul.packed.spec
    # Up to 256 rows an expert it beats dequantizing (`limits.ROWS_ON_QUANTIZED`).
    return supports_quantized(spec.shape[2], spec.blocksize) and prefers_quantized(
        matmul.rows, matmul.packed.experts
    )


def prepare(matmul: Matmul, routing: Routing, span: tuple[int, int], name: str) -> Tensor:
    """Return the absmax: as it is stored, or decoded, fp32 `(E, blocks, rows)`."""
    packed, nested = matmul.packed, matmul.packed.nested
    if nested is None:
        return packed.absmax
    shape, device = tuple(packed.absmax.shape), packed.absmax.device
    room, _ = workspace.allocate("absmax", shape, torch.float32, device)
    experts, n_rows, n_cols = packed.spec.shape
    blocks = n_cols // packed.blocksize
    launcher(absmax_kernel, (cdiv(n_rows, 64), cdiv(blocks, 32), experts), packed.absmax)(
        packed.absmax, *nested[:3], routing.expert_offsets, room,
        ROWS=n_rows, BLOCKS=blocks, NESTED=nested.blocksize, BR=64, BB=32, enable_fp_fusion=False,
    )  # fmt: skip
    return room


class Arguments(NamedTuple):
    """Arguments of kernels on codes, without codes and absmax.

    x stands in for absent tensors, and is not read as such.
    """

    order: Tensor  # Assignment of each row, where rows are gathered
    products: Tensor  # The rows' last columns, where rows are gathered
    factor: Tensor
    tiles: Tensor
    y: Tensor  # The output, not yet written
    numbers: tuple[int, ...]  # Strides of the absmax by row and block, the span, the factor's
    constants: dict[str, int]

    @staticmethod
    def from_matmul(
        x: Tensor, matmul: Matmul, absmax: Tensor, routing: Routing,
        span: tuple[int, int], products: Tensor | None,
    ) -> "Arguments":  # fmt: skip
        """Return those of a product; absmax is the one of `prepare`."""
        spec, factor = matmul.packed.spec, matmul.factor
        strides = 1 if spec.is_int8 else spec.shape[2] // spec.blocksize, 1
        if absmax is not matmul.packed.absmax:
            strides = 1, spec.shape[1]
        y = torch.empty(routing.count, span[1] - span[0], dtype=x.dtype, device=x.device)
        across = (0, 0, 0) if factor is None else factor.stride()
        order, top_k = (x, 0) if products is None else (routing.order, routing.top_k)
        constants = {
            "ROWS": spec.shape[1], "COLS": spec.shape[2], "STRIDE": x.stride(0), "TOP_K": top_k,
            "RANK": 0 if factor is None else factor.shape[2], "BLOCKSIZE": spec.blocksize,
        }  # fmt: skip
        return Arguments(
            order, x if products is None else products, x if factor is None else factor,
            routing.table(matmul.tile), y, (*strides, *span, *across), constants,
        )  # fmt: skip


def launch(
    x: Tensor, matmul: Matmul, absmax: Tensor, routing: Routing,
    span: tuple[int, int], products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a product as `table.Kernel` says."""
    packed, spec, config = matmul.packed, matmul.packed.spec, matmul.cut
    o = Arguments.from_matmul(x, matmul, absmax, routing, span, products)
    plain = spec.is_int8 or triton.knobs.runtime.interpret or not cards.takes_ptx(x.device)
    launcher(quantized_kernel, (cdiv(span[1] - span[0], config.features), len(o.tiles) // 2), x)(
        x, o.order, o.products, packed.flat_codes, absmax,
        packed.absmax if packed.table is None else packed.table,
        o.factor, o.tiles, routing.expert_offsets, o.y, *o.numbers, **o.constants,
        BACK=not matmul.by_rows, INT8=spec.is_int8, ASM="" if plain else lookup_asm(spec.kind),
        BM=matmul.tile, BN=config.features, BK=config.step, STAGES=config.stages,
        num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return o.y


KERNEL = Kernel(
    "portable",
    supports,
    lambda matmul: wide_tile(matmul.rows, matmul.packed.experts, WIDE_TILE),
    prepare,
    launch,
    cut=default,
)
