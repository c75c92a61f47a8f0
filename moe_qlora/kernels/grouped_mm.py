"""Many rows an expert: codes to 16 bit, and then each expert's rows times its matrix.

Decoding is one pass, and appends the LoRA factors to the weights. A group of 8 weights is one
32-bit word of codes; it never straddles a row or a block. A weight is its code's value from a
16-entry table (which stays in the L1 cache) times its block's absmax in fp32, rounded once: bit for
bit as bitsandbytes' kernel computes it. Product and sum are not fused, since bitsandbytes adds the
offset of a nested absmax in a step of its own. Bytes moved a weight, nf4 with
double quantization to bf16: 0.516 read, 2 written.

torch's grouped matmul multiplies, or our own on cards where torch's waits for the device: x `(R,
K)`, rows sorted by expert, times matrices `(E, K, N)`, views of the workspace that are contiguous
along rows or columns, is `(R, N)`. Rows that are tokens' ours fetches by index, on Hopper too,
where it is as quick as torch's. Copies of them took 231 us at 16,384 tokens; a layer's backward
takes 3.56 ms without and 3.73 with them (Qwen3-30B-A3B, H100).

A program computes one tile of rows, all of one expert, by some of the features. The host never
reads the experts' offsets, so it never waits. Rows of no expert are left unwritten. Programs that
run at the same time share their reads: `GROUP` tiles of rows are multiplied by the same features
before the next ones.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cards, workspace
from .lang import launcher, tl, triton
from .limits import WIDE_TILE, cdiv, row_stride, wide_tile
from .routing import Routing
from .table import Kernel, Matmul
from .weights import PackedWeight

BLOCK = 256  # Groups of 8 weights that a program decodes


@triton.jit
def block_absmax(absmax, table2, absmax2, offset, block, live, NESTED: tl.constexpr):
    """fp32 absmax of these blocks; NESTED is the second level's block size, 0 without one."""
    if NESTED > 0:
        code = tl.load(absmax + block, mask=live, other=0).to(tl.int32)
        outer = tl.load(absmax2 + block // NESTED, mask=live, other=0.0)
        value = tl.load(table2 + code) * outer + tl.load(offset)
    else:  # one return: Triton wants the dtypes of all branches to agree
        value = tl.load(absmax + block, mask=live, other=0.0)
    return value


@triton.jit
def _copy_factor(out, source, stride_r, stride_c, out_stride, first, total, WIDTH, N: tl.constexpr):
    i = first + tl.arange(0, N)
    live = i < total
    row, col = i // WIDTH, i % WIDTH
    value = tl.load(source + row * stride_r + col * stride_c, mask=live, other=0.0)
    tl.store(out + row * out_stride + col, value.to(out.dtype.element_ty), mask=live)


# A copied factor is read in any strides; specializing on the other sizes gains nothing.
@triton.jit(
    do_not_specialize=["first_row", "first_col", "right_se", "right_sr", "right_sc", "below_se",
                       "below_sr", "below_sc"]
)  # fmt: skip
def _decode_kernel(
    out, words, absmax, table, table2, absmax2, offset, expert_offsets, right, below,
    first_row, first_col, right_se, right_sr, right_sc, below_se, below_sr, below_sc,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLS: tl.constexpr,
    RANK_R: tl.constexpr, RANK_B: tl.constexpr, STRIDE: tl.constexpr,
    BLOCKSIZE: tl.constexpr, NESTED: tl.constexpr, INT8: tl.constexpr, SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One expert's matrix (program 1) in pieces of BLOCK groups of 8 weights (program 0).

    out: (E, ROWS + RANK_B, COLS + RANK_R), rows STRIDE apart, of weights (E, ALL_ROWS, ALL_COLS);
    right: (E, ROWS, RANK_R); below: (E, RANK_B, COLS).
    """
    GROUPS: tl.constexpr = ROWS * COLS // 8
    PIECES: tl.constexpr = (GROUPS + BLOCK - 1) // BLOCK
    piece = tl.program_id(0)
    expert = tl.program_id(1)
    if SKIP:
        if tl.load(expert_offsets + expert) == tl.load(expert_offsets + expert + 1):
            return
    expert = expert.to(tl.int64)
    out += expert * ((ROWS + RANK_B) * STRIDE)
    if piece < PIECES:
        eighth = tl.arange(0, 8)
        group = piece * BLOCK + tl.arange(0, BLOCK)
        live = group < GROUPS
        row = group // (COLS // 8)
        whole_row = first_row + row
        at = expert * (ALL_ROWS * ALL_COLS // 8) + whole_row * (ALL_COLS // 8)
        at += first_col // 8 + group % (COLS // 8)
        if INT8:
            place = (at * 8)[:, None] + eighth[None, :]
            value = tl.load(words + place, mask=live[:, None], other=0).to(tl.float32)
            scale = tl.load(absmax + expert * ALL_ROWS + whole_row, mask=live, other=0.0)
            value = value * scale[:, None] * 7.874015718698502e-3
        else:
            word = tl.load(words + at, mask=live, other=0)
            block = at // (BLOCKSIZE // 8)
            scale = block_absmax(absmax, table2, absmax2, offset, block, live, NESTED)
            # The first weight of a byte is its high half.
            nibble = (word[:, None] >> ((eighth ^ 1) * 4)[None, :]) & 15
            value = tl.load(table + nibble) * scale[:, None]
        to = group * 8 + row * (STRIDE - COLS)
        spots = out + to[:, None] + eighth[None, :]
        tl.store(spots, value.to(out.dtype.element_ty), mask=live[:, None])
    else:
        first = (piece - PIECES) * (BLOCK * 8)
        if RANK_R > 0:
            if first < ROWS * RANK_R:
                _copy_factor(
                    out + COLS, right + expert * right_se, right_sr, right_sc, STRIDE, first,
                    ROWS * RANK_R, RANK_R, BLOCK * 8,
                )  # fmt: skip
        if RANK_B > 0:
            if first < RANK_B * COLS:
                _copy_factor(
                    out + ROWS * STRIDE, below + expert * below_se, below_sr, below_sc, STRIDE,
                    first, RANK_B * COLS, COLS, BLOCK * 8,
                )  # fmt: skip


def decode(
    packed: PackedWeight, out: Tensor, *, corner: tuple[int, int] = (0, 0),
    expert_offsets: Tensor | None = None, right: Tensor | None = None, below: Tensor | None = None,
) -> None:  # fmt: skip
    """Decode a weight, or a part of each expert's matrix, into `out`.

    Rows and blocks are whole groups of 8 weights, and the packed tensors start at multiples of 16
    bytes. `out` is `(E, rows + r_b, cols + r_r)`, bf16, fp16 or fp32, in rows any distance apart;
    rows and cols are the weight's, or fewer, from `corner` on, whose column is a multiple of 8.
    `expert_offsets` `(E + 1,)` leave out experts without rows; None decodes all. `right` `(E, rows,
    r_r)` and `below` `(E, r_b, cols)`, of any strides, are written to the right of each matrix and
    below it.
    """
    assert out.stride(0) == out.shape[1] * out.stride(1) and out.stride(2) == 1
    spec, none = packed.spec, packed.absmax
    rank_r = 0 if right is None else right.shape[2]
    rank_b = 0 if below is None else below.shape[1]
    rows, cols = out.shape[1] - rank_b, out.shape[2] - rank_r
    assert cols % 8 == 0 and corner[1] % 8 == 0
    assert corner[0] + rows <= spec.shape[1] and corner[1] + cols <= spec.shape[2]
    pieces = cdiv(rows * cols // 8, BLOCK)
    extra = cdiv(max(rows * rank_r, rank_b * cols), BLOCK * 8)
    launcher(_decode_kernel, (pieces + extra, len(out)), out)(
        out,
        packed.flat_codes if spec.is_int8 else packed.flat_codes.view(torch.int32),
        packed.absmax, none if packed.table is None else packed.table,
        *((none,) * 3 if packed.nested is None else packed.nested[:3]),
        none if expert_offsets is None else expert_offsets,
        out if right is None else right, out if below is None else below,
        *corner, *((0, 0, 0) if right is None else right.stride()),
        *((0, 0, 0) if below is None else below.stride()),
        ROWS=rows, COLS=cols, ALL_ROWS=spec.shape[1], ALL_COLS=spec.shape[2], RANK_R=rank_r,
        RANK_B=rank_b, STRIDE=out.stride(1), BLOCKSIZE=spec.blocksize, NESTED=spec.nested,
        INT8=spec.is_int8, SKIP=expert_offsets is not None, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


class Cut(NamedTuple):
    """How the kernel is cut."""

    features: int  # Features that come out of a program
    step: int  # Features summed over in a step
    stages: int  # Steps loaded ahead
    warps: int  # Warps in a program
    group: int  # Tiles of rows that go through the same features at a time


_LARGE = dict.fromkeys((16, 32), Cut(128, 64, 4, 4, 8))
_LARGE |= dict.fromkeys((64, 128), Cut(256, 64, 4, 8, 8))
"""The cut on Hopper and datacenter Blackwell, by the rows in a tile: on an H200 as quick as torch's
for many rows."""

_SMALL = {**dict.fromkeys((16, 32, 64), Cut(128, 64, 3, 4, 8)), 128: Cut(128, 32, 4, 4, 8)}
"""The same elsewhere, where two programs fit 99 KiB: the code for 8.6 is quickest so on an H200,
or less than 3 % behind."""


def default(tile: int, device: torch.device) -> Cut:
    """Return the cut for tiles of `tile` rows."""
    return (_LARGE if cards.card(device).runs_on else _SMALL)[tile]


@triton.jit(do_not_specialize=["count"])
def grouped_kernel(
    x, order, products, matrices, tiles, expert_offsets, y, count,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    STRIDE: tl.constexpr, SE: tl.constexpr, SK: tl.constexpr, SN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y (R, N) = x (R, K), in rows STRIDE apart, times each expert's (K, N), SK and SN apart.

    With TOP_K, x are the tokens' rows, of which row i of the product has that of assignment
    order[i]; its last RANK features, behind the K, are products (R, RANK). tiles (count, 2): expert
    and first row of each, an expert of -1 for none.
    """
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    first_tile = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(count - first_tile, GROUP)
    within = pid % (GROUP * COLUMNS)
    tile = first_tile + within % size
    expert = tl.load(tiles + 2 * tile)
    if expert < 0:
        return
    start = tl.load(tiles + 2 * tile + 1)
    rows = tl.load(expert_offsets + expert + 1) - start
    # Rows and features beyond the last read the last one again, so no mask is needed.
    m = tl.arange(0, BM)
    n = within // size * BN + tl.arange(0, BN)
    inside = n < N
    safe = n
    if N % BN != 0 and SN != 1:
        safe = tl.minimum(n, N - 1)
    k = tl.arange(0, BK)
    row = start.to(tl.int64) + tl.minimum(m, rows - 1)
    if TOP_K > 0:
        left = x + (tl.load(order + row) // TOP_K).to(tl.int64)[:, None] * STRIDE + k[None, :]
    else:
        left = x + row[:, None] * STRIDE + k[None, :]
    columns = matrices + expert.to(tl.int64) * SE + safe[None, :] * SN
    right = columns + k[:, None] * SK
    total = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, mask=(first + k < K)[None, :], other=0.0)
        if N % BN != 0 and SN == 1:
            b = tl.load(right, mask=inside[None, :] & (first + k < K)[:, None], other=0.0)
        elif K % BK == 0:
            b = tl.load(right)
        else:
            b = tl.load(right, mask=(first + k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BK
        right += BK * SK
    if RANK > 0:
        r = tl.arange(0, RP)
        a = tl.load(
            products + row[:, None] * RANK + r[None, :], mask=(r < RANK)[None, :], other=0.0
        )
        more = inside[None, :] & (r < RANK)[:, None]
        b = tl.load(columns + (K + r)[:, None] * SK, mask=more, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    to = y + start.to(tl.int64) * N + m[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & inside[None, :])


def owner_of(packed: PackedWeight, routing: Routing) -> tuple[int, object]:
    """Return the key of a dequantized weight in the workspace."""
    # On meta no tensor has an address, but each has a storage.
    rows = routing.ints.data_ptr() or routing.ints.untyped_storage()._cdata
    return rows, packed.origin or packed.codes.data_ptr()


def prepare(matmul: Matmul, routing: Routing, span: tuple[int, int], name: str) -> Tensor:
    """Return the operand `(E, K + r, span)` of a grouped matmul, as a view of the workspace.

    With all features at once both factors are appended, so that backward can reuse the buffer.
    """
    packed, rank, by_rows, dtype = matmul.packed, matmul.rank, matmul.by_rows, matmul.dtype
    right, below = matmul.stored_factors
    experts, n_rows, n_cols = packed.spec.shape
    offsets, (first, end) = routing.expert_offsets, span
    corner, held = (0, 0), False
    if end - first == matmul.features:
        width = n_cols + rank
        room = experts, n_rows + rank, row_stride(width, dtype.itemsize)
        owner = owner_of(packed, routing)
        out, held = workspace.allocate(name, room, dtype, offsets.device, owner, (routing.ints,))
        out = out[:, :, :width]
        view = out[:, :n_rows].transpose(1, 2) if by_rows else out[:, :, :n_cols]
    elif by_rows:
        room, corner = (experts, end - first, n_cols + rank), (first, 0)
        out, _ = workspace.allocate("first", room, dtype, offsets.device)
        right, below = None if right is None else right[:, first:end], None
        view = out.transpose(1, 2)
    else:
        room, corner = (experts, n_rows + rank, end - first), (0, first)
        out, _ = workspace.allocate("first", room, dtype, offsets.device)
        right, below = None, None if below is None else below[:, :, first:end]
        view = out
    if not held:
        decode(packed, out, corner=corner, expert_offsets=offsets, right=right, below=below)
    return view


def launch(
    by_torch: bool, x: Tensor, matmul: Matmul, matrices: Tensor, routing: Routing,
    span: tuple[int, int], products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a product as `table.Kernel` says, by torch's grouped matmul or our own.

    matrices `(E, K + r, span)` have rows, or columns, any distance apart.
    """
    if products is None and by_torch:
        return F.grouped_mm(x, matrices, offs=routing.ends)
    (across, down, along), (_, inner, out) = matrices.stride(), matrices.shape
    assert 1 in (down, along)
    order, top_k, rank = x, 0, 0
    if products is not None:
        order, top_k, rank = routing.order, routing.top_k, inner - x.shape[1]
    y = torch.empty(routing.count, out, dtype=x.dtype, device=x.device)
    tiles, cut = routing.table(matmul.tile), matmul.cut
    many = tiles.numel() // 2
    launcher(grouped_kernel, (many * cdiv(out, cut.features),), x)(
        x, order, x if products is None else products, matrices, tiles, routing.expert_offsets, y,
        many, K=inner - rank, N=out, TOP_K=top_k, RANK=rank,
        RP=max(16, triton.next_power_of_2(rank)), STRIDE=x.stride(0), SE=across, SK=down, SN=along,
        BM=matmul.tile, BN=cut.features, BK=cut.step, STAGES=cut.stages, GROUP=cut.group,
        num_warps=cut.warps,
    )  # fmt: skip
    return y


BY_TORCH = Kernel(
    "dequantize + torch",
    lambda matmul: cards.multiplies_by_torch(
        cards.device_of(matmul.packed.spec.device), matmul.dtype
    ),
    lambda matmul: wide_tile(matmul.rows, matmul.packed.experts, WIDE_TILE),
    prepare,
    partial(launch, True),
    on_codes=False,
    cut=lambda matmul, tile: default(tile, cards.device_of(matmul.packed.spec.device)),
)

KERNEL = replace(
    BY_TORCH,
    name="dequantize + grouped",
    supports=lambda matmul: True,
    launch=partial(launch, False),
)
