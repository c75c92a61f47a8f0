"""Kernels over sorted rows, and how each is launched: permute, gate, its backward, unpermute.

Shapes: T tokens, k assignments a token, R = T k rows sorted by expert, E experts, H hidden size,
I intermediate size, r rank (padded, see `limits.padded`), N features.

These kernels move all of a layer's bytes besides its matrix products, so each fuses what it can
into one pass over the rows: the low-rank product with the copy or the gate, the routing weights'
gradient with the gate's. No atomics: every sum is computed by one program, in one order.

Rows are processed in tiles of one expert's rows (`limits.tile_rows`), each tile by programs of 16
or 32 rows. A kernel writes the table of tiles as well (`routing.py`), so that the host never has to
read the routing.
"""

from __future__ import annotations

from typing import NamedTuple

from . import cards
from .lang import tl, triton
from .launch import Geometry, launcher
from .limits import ColumnOrder, cdiv

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}

# Rows and columns of a program's step, measured on an H200 with the sizes of
# Qwen3-30B-A3B. One stage: with loads ahead a layer is 3 % slower, and 64 rows by 4 warps are a
# race: Hopper's product still runs while its tile, which is stored as well, is overwritten, since
# Triton 3.6 gives such a load a buffer too few (up to 21 % off).
_ROWS = 16
_PERMUTE_FEW = {"BM": _ROWS, "num_warps": 4, "num_stages": 1}
_GATE_FEW = {"BM": _ROWS, "num_warps": 8, "num_stages": 1}
"""For tiles of 16, where the time is the number of steps: a token is copied in 0.011 ms by 512
columns a step, in 0.034 by 64."""
_FACTOR_PART = 8192
"""Numbers of a factor in such a step: 16 KiB of the 99 that most cards have."""
_STEPS = 8
"""Most steps that such a program unrolls, so that its code stays short. With a bias as well, which
only backward has, copied rows would not stay in registers."""
_PRODUCTS = {"BK": 64, "num_warps": 4}
"""For whole tiles that are not copied, only multiplied: 0.02 ms at 4,096 tokens, 0.28 for
DeepSeek-V3 at 16,384, where 16 rows a program take 0.05 and 0.53."""
_GATE = {"BM": _ROWS, "BI": 256, "num_warps": 4, "num_stages": 2}
_GATE_ORDERED = {"BM": _ROWS, "num_warps": 4, "num_stages": 2}
"""For columns in a `ColumnOrder`, whose width is a step's. Loads of the next step in this one: 176
us for 16,384 tokens, 213 without."""
_GATE_BACKWARD = {"BM": _ROWS, "BI": 128, "num_warps": 4, "num_stages": 3}
_GATE_BACKWARD_FEW = {"BM": _ROWS, "BI": 64, "num_warps": 2, "num_stages": 1}


_SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")
"""1 / (1 + 2^(-z log2 e)) in 4 instructions; Triton's, right for denormals too, takes 14, and the
gate's kernels are bound by their instructions as much as by the memory."""


class Gate(NamedTuple):
    """h = (clamp(up, -limit, limit) + shift) act(min(gate, limit)), or act(pre) where not gated."""

    act: str  # Key of `ACTS`; "silu" is z sigmoid(alpha z)
    gated: bool = True  # Whether pre has gate and up
    interleaved: bool = False  # Whether gate and up alternate, else gate is the first half
    limit: float | None = None  # Clamp, None without one
    alpha: float = 1.0  # Of silu
    shift: float = 0.0  # Added to up

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Limit, alpha and shift, the kernels' arguments."""
        return self.limit or 0.0, self.alpha, self.shift

    @property
    def flags(self) -> dict[str, int | bool]:
        """The kernels' constants."""
        return {
            "ACT": ACTS[self.act],
            "GATED": self.gated,
            "INTERLEAVED": self.gated and self.interleaved,
            "LIMITED": self.limit is not None,
            "PLAIN": self.alpha == 1 and self.shift == 0,
        }


@triton.jit
def _tile(tiles, expert_offsets, BM: tl.constexpr):
    """This program's expert (-1: none), its rows, and which of them are the expert's."""
    pid = tl.program_id(0)
    expert = tl.load(tiles + 2 * pid)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rows < 0
    if expert >= 0:
        first, end = tl.load(tiles + 2 * pid + 1), tl.load(expert_offsets + expert + 1)
        rows += first
        live = rows < end
        if first + tl.program_id(1) * BM >= end:
            expert = -1
    return expert, rows.to(tl.int64), live


@triton.jit
def _sigmoid(z, PTX: tl.constexpr):
    """The logistic function; by PTX it is 0 below 2^-126, and else the same to the bit."""
    if PTX:
        return tl.inline_asm_elementwise(
            _SIGMOID, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(z)


@triton.jit
def _act(z, alpha, ACT: tl.constexpr, PLAIN: tl.constexpr, PTX: tl.constexpr):
    """The activation, by its number in `ACTS`, and its derivative, in fp32."""
    if ACT == 0:
        scaled = z if PLAIN else z * alpha
        s = _sigmoid(scaled, PTX)
        return z * s, s * (1.0 + scaled * (1.0 - s))
    if ACT == 1:
        inner = 1.5957691216057308 * (z + 0.044715 * z * z * z)
        s = _sigmoid(inner, PTX)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        return z * s, s + z * s * (1.0 - s) * slope
    if ACT == 2:
        phi = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return z * phi, phi + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    if ACT == 3:
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    p = tl.maximum(z, 0.0)
    return p * p, 2.0 * p


@triton.jit
def _load_pre(
    pre, bias, expert, rows, cols, live, I: tl.constexpr, BI: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Gate and up halves (BM, BI) of the pre-activation in fp32, bias added."""
    WIDTH: tl.constexpr = 2 * I if GATED else I
    start = rows[:, None] * WIDTH
    ok = live[:, None] & (cols < I)[None, :]
    if INTERLEAVED:
        both = 2 * tl.min(cols, 0) + tl.arange(0, 2 * BI)
        inside = both < WIDTH
        pair = tl.load(pre + start + both[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        pair = pair.to(tl.float32)
        if BIASED:
            add = tl.load(bias + expert * WIDTH + both, mask=inside, other=0.0)
            pair += add.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(pair, [pair.shape[0], BI, 2]))
    else:
        gate = tl.load(pre + start + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(pre + start + I + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        if BIASED:
            spot = bias + expert * WIDTH + cols
            gate += tl.load(spot, mask=cols < I, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(spot + I, mask=cols < I, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def _factor_rows(factor, k, j, K: tl.constexpr, RANK: tl.constexpr, OVER: tl.constexpr):
    """Rows k of a factor (K, RANK), stored (RANK, K) if OVER."""
    spots = k[:, None] * RANK + j[None, :]
    if OVER:
        spots = j[None, :] * K + k[:, None]
    return tl.load(factor + spots, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _gate(
    gate, up, limit, alpha, shift,
    ACT: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr, PLAIN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """h, dh/dgate and dh/dup."""
    z, v = gate, up
    if LIMITED:
        z = tl.minimum(gate, limit)
        v = tl.minimum(tl.maximum(up, -limit), limit)
    value, slope = _act(z, alpha, ACT, PLAIN, PTX)
    if not GATED:
        return value, slope, slope
    if not PLAIN:
        v += shift
    d_gate, d_up = v * slope, value
    if LIMITED:
        d_gate = tl.where(gate <= limit, d_gate, 0.0)
        d_up = tl.where((up >= -limit) & (up <= limit), d_up, 0.0)
    return v * value, d_gate, d_up


@triton.jit
def _weigh(products, out, rows, live, w, RANK: tl.constexpr):
    """Rows of `out` (R, RANK) become w times those of `products`."""
    spots = rows[:, None] * RANK + tl.arange(0, RANK)[None, :]
    product = tl.load(products + spots, mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(out + spots, (product * w[:, None]).to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def permute_kernel(
    x, order, factor, tiles, expert_offsets, out, small, bias, dots, scaling,
    K: tl.constexpr, STRIDE: tl.constexpr, TOP_K: tl.constexpr, RANK: tl.constexpr,
    OVER: tl.constexpr, BIASED: tl.constexpr, COPIES: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[i] = (x_i, scaling x_i F_e), small[i] the same product, dots[i] = <x_i, bias_e>.

    x_i is row order[i] // TOP_K of x. out (R, K + RANK) in rows STRIDE apart, not written where
    STRIDE is 0, and without x_i unless COPIES; small (R, RANK), F (E, K, RANK), stored (E, RANK, K)
    if OVER. STEPS, where over 1: all there are, unrolled, each one's loads ahead of the step before
    it, past whose stores the compiler would not move them.
    """
    expert, rows, live = _tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    source = (tl.load(order + rows, mask=live, other=0) // TOP_K).to(tl.int64)
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    factor += expert.to(tl.int64) * (K * RANK)
    if STEPS > 1:
        k = tl.arange(0, BK)
        if RANK > 0:
            next_f = _factor_rows(factor, k, j, K, RANK, OVER)
        ok = live[:, None] & (k < K)[None, :]
        next_value = tl.load(x + source[:, None] * K + k[None, :], mask=ok, other=0.0)
    for start in tl.range(0, K, BK, loop_unroll_factor=STEPS):
        k = start + tl.arange(0, BK)
        ok = live[:, None] & (k < K)[None, :]
        if STEPS > 1:
            value = next_value
            if RANK > 0:
                f = next_f
                next_f = _factor_rows(factor, k + BK, j, K, RANK, OVER)
            later = live[:, None] & (k + BK < K)[None, :]
            next_value = tl.load(x + source[:, None] * K + (k + BK)[None, :], mask=later, other=0.0)
        else:
            value = tl.load(x + source[:, None] * K + k[None, :], mask=ok, other=0.0)
        if COPIES:
            tl.store(out + rows[:, None] * STRIDE + k[None, :], value, mask=ok)
        if RANK > 0:
            if STEPS == 1:
                f = _factor_rows(factor, k, j, K, RANK, OVER)
            product = tl.dot(value, f, product, input_precision="ieee")
        if BIASED:
            add = tl.load(bias + expert * K + k, mask=k < K, other=0.0)
            dot += tl.sum(value.to(tl.float32) * add.to(tl.float32)[None, :], 1)
    if RANK > 0:
        tail = (product * scaling).to(small.dtype.element_ty)
        if STRIDE > 0:
            tl.store(out + rows[:, None] * STRIDE + K + j[None, :], tail, mask=live[:, None])
        tl.store(small + rows[:, None] * RANK + j[None, :], tail, mask=live[:, None])
    if BIASED:
        tl.store(dots + rows, dot, mask=live)


@triton.jit
def copy_rows_kernel(
    x, inverse, expert_offsets, out, K: tl.constexpr, STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    E: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[inverse[a]] = row a // TOP_K of x, for each assignment a, in rows STRIDE apart.

    Only rows [0, expert_offsets[E]) of out are written. A row of x is read once for its TOP_K.
    """
    token = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    value = tl.load(x + token.to(tl.int64) * K + k, mask=k < K, other=0.0)
    end = tl.load(expert_offsets + E)
    for slot in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + slot)
        tl.store(out + row.to(tl.int64) * STRIDE + k, value, mask=(row < end) & (k < K))


@triton.jit
def gate_kernel(
    pre, bias, factor, tiles, expert_offsets, out, small, scaling, limit, alpha, shift,
    I: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr,
    RUNS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMITED: tl.constexpr, PLAIN: tl.constexpr, BIASED: tl.constexpr, PTX: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """out[i] = (h_i, scaling h_i F_e) with h the gate of pre_i; small[i] the same product.

    out (R, I + RANK) in rows STRIDE apart, F (E, I, RANK), stored (E, RANK, I). Where GROUPS, h's
    columns are in such a `ColumnOrder` of width BI. STEPS: as of `permute_kernel`.
    """
    expert, rows, live = _tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    factor += expert.to(tl.int64) * (I * RANK)
    if STEPS > 1:
        i = tl.arange(0, BI)
        next_gate, next_up = _load_pre(
            pre, bias, expert, rows, i, live, I, BI, GATED, INTERLEAVED, BIASED
        )  # fmt: skip
        if RANK > 0:
            next_f = _factor_rows(factor, i, j, I, RANK, True)
    for start in tl.range(0, I, BI, loop_unroll_factor=STEPS):
        i = start + tl.arange(0, BI)
        if STEPS > 1:
            gate, up = next_gate, next_up
            next_gate, next_up = _load_pre(
                pre, bias, expert, rows, i + BI, live, I, BI, GATED, INTERLEAVED, BIASED
            )  # fmt: skip
            if RANK > 0:
                f = next_f
                next_f = _factor_rows(factor, i + BI, j, I, RANK, True)
        else:
            gate, up = _load_pre(
                pre, bias, expert, rows, i, live, I, BI, GATED, INTERLEAVED, BIASED
            )  # fmt: skip
        h, _, _ = _gate(gate, up, limit, alpha, shift, ACT, GATED, LIMITED, PLAIN, PTX)
        h = tl.where((i < I)[None, :], h, 0.0).to(out.dtype.element_ty)
        ok = live[:, None] & (i < I)[None, :]
        ordered = h
        if GROUPS > 0:
            groups = tl.reshape(h, (BM, GROUPS, RUNS, 2))
            ordered = tl.reshape(tl.permute(groups, (0, 2, 1, 3)), (BM, BI))
        tl.store(out + rows[:, None] * STRIDE + i[None, :], ordered, mask=ok)
        if RANK > 0:
            if STEPS == 1:
                f = _factor_rows(factor, i, j, I, RANK, True)
            product = tl.dot(h, f, product, input_precision="ieee")
    if RANK > 0:
        tail = (product * scaling).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * STRIDE + I + j[None, :], tail, mask=live[:, None])
        tl.store(small + rows[:, None] * RANK + j[None, :], tail, mask=live[:, None])


@triton.jit
def gate_backward_kernel(
    u, pre, bias, weights, order, dots, factor, tiles, expert_offsets, out, grad_weights,
    product_g, product2, weighted2, scaling, limit, alpha, shift,
    I: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr,
    PLAIN: tl.constexpr, DOTS: tl.constexpr, RANK2: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Gradients of the pre-activation and of the routing weights.

    Where the second projection has LoRA, of rank RANK2: h in the place of u, and what its factors'
    gradients weight by w, w product_g (R, RANK2) in its place and w product2 (R, RANK2) in
    weighted2.

    u (R, I): gradient of h before the routing weight w. out[i] = (d, scaling d F_e) with
    d = w u dh/dpre, out (R, width + RANK) in rows STRIDE apart, F (E, width, RANK);
    grad_weights[order[i]] = <u_i, h_i> (+ dots[i]).
    """
    expert, rows, live = _tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    WIDTH: tl.constexpr = 2 * I if GATED else I
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    assignment = tl.load(order + rows, mask=live, other=0)
    w = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)
    if RANK2 > 0:
        _weigh(product_g, product_g, rows, live, w, RANK2)
        _weigh(product2, weighted2, rows, live, w, RANK2)
    factor += expert.to(tl.int64) * (WIDTH * RANK)
    dtype = out.dtype.element_ty
    for start in range(0, I, BI):
        i = start + tl.arange(0, BI)
        inside = i < I
        ok = live[:, None] & inside[None, :]
        gate, up = _load_pre(
            pre, bias, expert, rows, i, live, I, BI, GATED, INTERLEAVED, BIASED
        )  # fmt: skip
        spots_u = u + rows[:, None] * I + i[None, :]
        d = tl.load(spots_u, mask=ok, other=0.0).to(tl.float32)
        h, d_gate, d_up = _gate(gate, up, limit, alpha, shift, ACT, GATED, LIMITED, PLAIN, PTX)
        dot += tl.sum(d * h, 1)
        if RANK2 > 0:
            tl.store(spots_u, h.to(dtype), mask=ok)
        d *= w[:, None]
        d_gate = tl.where(inside[None, :], d * d_gate, 0.0).to(dtype)
        start_out = out + rows[:, None] * STRIDE
        if INTERLEAVED:
            d_up = tl.where(inside[None, :], d * d_up, 0.0).to(dtype)
            both = 2 * start + tl.arange(0, 2 * BI)
            pair = tl.interleave(d_gate, d_up)
            okay = live[:, None] & (both < WIDTH)[None, :]
            tl.store(start_out + both[None, :], pair, mask=okay)
            if RANK > 0:
                spots = factor + both[:, None] * RANK + j[None, :]
                f = tl.load(spots, mask=(both < WIDTH)[:, None], other=0.0)
                product = tl.dot(pair, f, product, input_precision="ieee")
        else:
            tl.store(start_out + i[None, :], d_gate, mask=ok)
            if RANK > 0:
                spots = factor + i[:, None] * RANK + j[None, :]
                f = tl.load(spots, mask=inside[:, None], other=0.0)
                product = tl.dot(d_gate, f, product, input_precision="ieee")
            if GATED:
                d_up = tl.where(inside[None, :], d * d_up, 0.0).to(dtype)
                tl.store(start_out + I + i[None, :], d_up, mask=ok)
                if RANK > 0:
                    f = tl.load(spots + I * RANK, mask=inside[:, None], other=0.0)
                    product = tl.dot(d_up, f, product, input_precision="ieee")
    if RANK > 0:
        tail = (product * scaling).to(dtype)
        tl.store(out + rows[:, None] * STRIDE + WIDTH + j[None, :], tail, mask=live[:, None])
    if DOTS:
        dot += tl.load(dots + rows, mask=live, other=0.0)
    tl.store(grad_weights + assignment, dot.to(grad_weights.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def unpermute_kernel(
    y, inverse, weights, index, bias, expert_offsets, out, tokens, first, size,
    N: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, PARTIAL: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum over t's assignments, in their order, of w (y_row + bias_e), in fp32.

    y (R, N) are the columns [first, first + N) of out (T, size) and bias (E, size).
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    here = t < tokens
    total = tl.zeros([BT, BN], tl.float32)
    for slot in tl.static_range(TOP_K):
        assignment = t * TOP_K + slot
        row = tl.load(inverse + assignment, mask=here, other=0)
        live = here
        if PARTIAL:
            live = here & (row < tl.load(expert_offsets + E))
        ok = live[:, None] & (n < N)[None, :]
        value = tl.load(y + row.to(tl.int64)[:, None] * N + n[None, :], mask=ok, other=0.0)
        value = value.to(tl.float32)
        if BIASED:
            expert = tl.load(index + assignment, mask=live, other=0).to(tl.int32)
            add = tl.load(bias + expert[:, None] * size + (first + n)[None, :], mask=ok, other=0.0)
            value += add.to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)[:, None]
        total += value
    ok = here[:, None] & (n < N)[None, :]
    to = out + t.to(tl.int64)[:, None] * size + (first + n)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=ok)


def _unrolled(size: int, block: int, tile: int) -> int:
    """Return how many steps are unrolled, each step's loads ahead of the step before: all or 1."""
    steps = cdiv(size, block)
    return steps if tile == _ROWS and steps <= _STEPS else 1


def _takes_ptx(device: int) -> bool:
    """Whether kernels on a device, by its index or -1 for the CPU, may contain PTX."""
    return not triton.knobs.runtime.interpret and cards.takes_ptx(cards.device_of(device))


def copies_apart(tile: int) -> bool:
    """Whether rows in tiles of so many are copied by `copy_rows_kernel`, and multiplied apart."""
    return tile > _ROWS


@launcher(permute_kernel)
def launch_permute(
    size: int, stride: int, rank: int, over_rows: bool, top_k: int, tile: int, tiles: int,
    biased: bool,
) -> Geometry:  # fmt: skip
    """The tokens' rows, unless `copies_apart`, with the first factor's product.

    Stride 0: the product alone.
    """
    # With a bias, loads ahead would be the race that is described at `_ROWS`.
    cut = {"BM": tile, **_PRODUCTS, "num_stages": 1 if biased else 2}
    if tile == _ROWS:
        cut = {"BK": min(512, _FACTOR_PART // max(rank, 16)), **_PERMUTE_FEW}
    return (tiles, tile // cut["BM"]), {
        "K": size, "STRIDE": stride, "TOP_K": top_k, "RANK": rank, "OVER": over_rows,
        "BIASED": biased, "COPIES": stride > 0 and not copies_apart(tile),
        "STEPS": 1 if biased else _unrolled(size, cut["BK"], tile), **cut,
    }  # fmt: skip


@launcher(copy_rows_kernel)
def launch_copy_rows(tokens: int, size: int, stride: int, top_k: int, experts: int) -> Geometry:
    """The tokens' rows alone.

    54 and 231 us at 4,096 and 16,384 tokens (Qwen3-30B-A3B, H100). In the experts' order each row
    is read TOP_K times, and copying takes 72 and 346.
    """
    block = min(triton.next_power_of_2(size), 2048)
    return (tokens, cdiv(size, block)), {
        "K": size, "STRIDE": stride, "TOP_K": top_k, "E": experts, "BK": block, "num_warps": 2,
    }  # fmt: skip


@launcher(gate_kernel)
def launch_gate(
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int,
    order: ColumnOrder | None, biased: bool, device: int = -1,
) -> Geometry:  # fmt: skip
    """The gate with the second factor's product; `order`: of the columns, or None."""
    cut = _GATE if order is None else {**_GATE_ORDERED, "BI": order.width}
    if tile == _ROWS:
        cut = {"BI": min(256, _FACTOR_PART // max(rank, 16)), **_GATE_FEW}
    return (tiles, tile // cut["BM"]), {
        "I": size, "STRIDE": stride, "RANK": rank, "GROUPS": order.groups if order else 0,
        "RUNS": order.runs if order else 0, "BIASED": biased,
        "STEPS": _unrolled(size, cut["BI"], tile), "PTX": _takes_ptx(device), **gate.flags, **cut,
    }  # fmt: skip


@launcher(gate_backward_kernel)
def launch_gate_backward(
    gate: Gate, size: int, stride: int, rank: int, rank2: int, tile: int, tiles: int,
    biased: bool, dots: bool, device: int = -1,
) -> Geometry:  # fmt: skip
    """Back through the gate."""
    cut = _GATE_BACKWARD_FEW if tile == _ROWS else _GATE_BACKWARD
    return (tiles, tile // cut["BM"]), {
        "I": size, "STRIDE": stride, "RANK": rank, "BIASED": biased, "DOTS": dots, "RANK2": rank2,
        "PTX": _takes_ptx(device), **gate.flags, **cut,
    }  # fmt: skip


@launcher(unpermute_kernel)
def launch_unpermute(
    tokens: int, first: int, end: int, size: int, top_k: int, experts: int, partial: bool,
    weighted: bool, biased: bool,
) -> Geometry:  # fmt: skip
    """Rows' columns [first, end) of `size`, summed to tokens."""
    width = end - first
    block = min(triton.next_power_of_2(width), 1024)
    return (tokens, cdiv(width, block)), {
        "N": width, "TOP_K": top_k, "E": experts, "WEIGHTED": weighted, "BIASED": biased,
        "PARTIAL": partial, "BT": 1, "BN": block, "num_warps": 4,
    }  # fmt: skip
