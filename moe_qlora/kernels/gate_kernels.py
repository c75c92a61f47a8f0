"""The gate between both projections of the experts, and its backward.

Shapes are those of `row_kernels.py`. What LoRA needs of the rows that the gate writes is computed
in the same pass: their product with the second projection's A, or with the first's B in backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import cards
from .lang import launcher, tl, triton
from .limits import ORDER
from .routing import Routing
from .row_kernels import FACTOR_PART, ROWS, factor_rows, rows_of_tile

ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}

# A step's columns BI are those that `limits.ORDER` permutes together. Two stages: 176 us for 16,384
# tokens, 213 with one.
_GATE = {"BI": 256, "num_warps": 4, "num_stages": 2}
_BACKWARD = {"BI": 128, "num_warps": 4, "num_stages": 3}
_BACKWARD_FEW = {"BI": 64, "num_warps": 2, "num_stages": 1}  # For tiles of 16 rows


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
    BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """out[i] = (h_i, scaling h_i F_e) with h the gate of pre_i; small[i] the same product.

    out (R, I + RANK) in rows STRIDE apart, F (E, I, RANK), stored (E, RANK, I). Where GROUPS, h's
    columns are in `limits.ORDER`, BI at a time.
    """
    expert, rows, live = rows_of_tile(tiles, expert_offsets, BM)
    if expert < 0:
        return
    j = tl.arange(0, RANK if RANK > 0 else 16)
    product = tl.zeros([BM, RANK if RANK > 0 else 16], tl.float32)
    factor += expert.to(tl.int64) * (I * RANK)
    for start in tl.range(0, I, BI):
        i = start + tl.arange(0, BI)
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


def _flags(gate: Gate, device: torch.device) -> dict[str, int | bool]:
    ptx = not triton.knobs.runtime.interpret and cards.takes_ptx(device)
    return {
        "ACT": ACTS[gate.act], "GATED": gate.gated, "INTERLEAVED": gate.gated and gate.interleaved,
        "LIMITED": gate.limit is not None, "PLAIN": gate.alpha == 1 and gate.shift == 0,
        "PTX": ptx,
    }  # fmt: skip


def apply_gate(
    gate: Gate, pre: Tensor, bias: Tensor | None, routing: Routing, out: Tensor,
    factor: Tensor | None, rank: int, scaling: float, small: Tensor, *, ordered: bool,
) -> None:  # fmt: skip
    """Write the gate of `pre` and its product with a factor to `out` `(R, I + rank)`.

    The product is written to `small` as well. `ordered`: the gate's columns in `limits.ORDER`.
    """
    size = out.shape[1] - rank
    groups, runs = ORDER if ordered else (0, 0)
    cut = _GATE
    if routing.tile == ROWS:
        cut = {"BI": min(256, FACTOR_PART // max(rank, 16)), "num_warps": 8, "num_stages": 1}
    launcher(gate_kernel, (routing.counts[0], routing.tile // ROWS), pre)(
        pre, pre if bias is None else bias,
        pre if factor is None else factor, routing.tiles, routing.expert_offsets, out, small,
        scaling, *gate.numbers, I=size, STRIDE=out.stride(0), RANK=rank, GROUPS=groups, RUNS=runs,
        BIASED=bias is not None, BM=ROWS, **_flags(gate, pre.device), **cut,
    )  # fmt: skip


def gate_backward(
    gate: Gate, u: Tensor, pre: Tensor, bias: Tensor | None, weights: Tensor,
    dots: Tensor | None, routing: Routing, out: Tensor, d_weights: Tensor, factor: Tensor | None,
    rank: int, scaling: float, product_g: Tensor, product2: Tensor, weighted2: Tensor, rank2: int,
) -> None:  # fmt: skip
    """Go back through the gate, as `gate_backward_kernel` says."""
    cut = _BACKWARD_FEW if routing.tile == ROWS else _BACKWARD
    launcher(gate_backward_kernel, (routing.counts[0], routing.tile // ROWS), u)(
        u, pre, u if bias is None else bias, weights, routing.order, u if dots is None else dots,
        u if factor is None else factor, routing.tiles, routing.expert_offsets, out, d_weights,
        product_g, product2, weighted2, scaling, *gate.numbers, I=u.shape[1],
        STRIDE=out.stride(0), RANK=rank, RANK2=rank2, BIASED=bias is not None,
        DOTS=dots is not None, BM=ROWS, **_flags(gate, u.device), **cut,
    )  # fmt: skip
