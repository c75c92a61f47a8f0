"""The gate between both projections of the experts, and its backward: kernels, and their launches.

Shapes are those of `row_kernels.py`. What LoRA needs of the rows that the gate writes is computed
in the same pass: their product with the second projection's A, or with the first's B in backward.
"""

from __future__ import annotations

from typing import NamedTuple

from . import cards, row_kernels
from .lang import tl, triton
from .launch import Geometry, launcher
from .limits import ColumnOrder
from .row_kernels import ROWS, factor_rows, rows_of_tile

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}

_FEW = {"BM": ROWS, "num_warps": 8, "num_stages": 1}
"""For tiles of 16 rows, as `row_kernels._PERMUTE_FEW`."""
_GATE = {"BM": ROWS, "BI": 256, "num_warps": 4, "num_stages": 2}
_ORDERED = {"BM": ROWS, "num_warps": 4, "num_stages": 2}
"""For columns in a `ColumnOrder`, whose width is a step's. Loads of the next step in this one: 176
us for 16,384 tokens, 213 without."""
_BACKWARD = {"BM": ROWS, "BI": 128, "num_warps": 4, "num_stages": 3}
_BACKWARD_FEW = {"BM": ROWS, "BI": 64, "num_warps": 2, "num_stages": 1}


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
def _gate(
    gate, up, limit, alpha, shift,
    ACT: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr, PLAIN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
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
    spots = rows[:, None] * RANK + tl.arange(0, RANK)[None, :]
    product = tl.load(products + spots, mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(out + spots, (product * w[:, None]).to(out.dtype.element_ty), mask=live[:, None])


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
    expert, rows, live = rows_of_tile(tiles, expert_offsets, BM)
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
            next_f = factor_rows(factor, i, j, I, RANK, True)
    for start in tl.range(0, I, BI, loop_unroll_factor=STEPS):
        i = start + tl.arange(0, BI)
        if STEPS > 1:
            gate, up = next_gate, next_up
            next_gate, next_up = _load_pre(
                pre, bias, expert, rows, i + BI, live, I, BI, GATED, INTERLEAVED, BIASED
            )  # fmt: skip
            if RANK > 0:
                f = next_f
                next_f = factor_rows(factor, i + BI, j, I, RANK, True)
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
                f = factor_rows(factor, i, j, I, RANK, True)
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
    expert, rows, live = rows_of_tile(tiles, expert_offsets, BM)
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


def _takes_ptx(device: int) -> bool:
    return not triton.knobs.runtime.interpret and cards.takes_ptx(cards.device_of(device))


@launcher(gate_kernel)
def launch_gate(
    gate: Gate, size: int, stride: int, rank: int, tile: int, tiles: int,
    order: ColumnOrder | None, biased: bool, device: int = -1,
) -> Geometry:  # fmt: skip
    """The gate with the second factor's product; `order`: of the columns, or None."""
    cut = _GATE if order is None else {**_ORDERED, "BI": order.width}
    if tile == ROWS:
        cut = {"BI": min(256, row_kernels.FACTOR_PART // max(rank, 16)), **_FEW}
    return (tiles, tile // cut["BM"]), {
        "I": size, "STRIDE": stride, "RANK": rank, "GROUPS": order.groups if order else 0,
        "RUNS": order.runs if order else 0, "BIASED": biased,
        "STEPS": row_kernels.unrolled(size, cut["BI"], tile), "PTX": _takes_ptx(device),
        **gate.flags, **cut,
    }  # fmt: skip


@launcher(gate_backward_kernel)
def launch_gate_backward(
    gate: Gate, size: int, stride: int, rank: int, rank2: int, tile: int, tiles: int,
    biased: bool, dots: bool, device: int = -1,
) -> Geometry:  # fmt: skip
    """Back through the gate."""
    cut = _BACKWARD_FEW if tile == ROWS else _BACKWARD
    return (tiles, tile // cut["BM"]), {
        "I": size, "STRIDE": stride, "RANK": rank, "BIASED": biased, "DOTS": dots, "RANK2": rank2,
        "PTX": _takes_ptx(device), **gate.flags, **cut,
    }  # fmt: skip
