"""A whole layer of packed experts on the kernels, in fp32, beside plain products."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from moe_qlora.experts import backend
from moe_qlora.kernels import moe_layer
from moe_qlora.kernels.gate_kernels import Gate
from moe_qlora.kernels.moe_layer import Layer, Lora
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings
from tests.helpers.mxfp4 import keep, random_mxfp4


def stack_of(shape, kind, double, dtype=torch.float32, size=0.2):
    if kind == "mxfp4":
        return keep(*random_mxfp4(*shape), transposed=False, dtype=dtype)
    storage = torch.int8 if kind == "int8" else torch.uint8
    return codec.pack(torch.randn(shape).to(dtype) * size, CodecSettings(kind, double, storage))


def tiled(offsets, count, tile, order=None, top_k=1):
    """`count` sorted rows in tiles, as of a `Routing`; an expert's lie between its `offsets`."""
    ends = offsets.tolist()
    experts = len(ends) - 1
    table = [[e, first] for e in range(experts) for first in range(ends[e], ends[e + 1], tile)]
    tiles = torch.tensor([*table, [-1, 0]], dtype=torch.int32, device=offsets.device).flatten()
    return SimpleNamespace(
        expert_offsets=offsets, experts=experts, count=count, order=order, top_k=top_k,
        tiles=tiles, table=lambda tile: tiles,
    )  # fmt: skip


SILU = Gate("silu")


@dataclass
class Case:
    """One layer."""

    tokens: int = 13
    top_k: int = 2
    experts: int = 5
    hidden: int = 32
    inner: int = 24
    gate: Gate = SILU
    transposed: bool = False
    biased: bool = False
    ranks: tuple[int, int] = (3, 16)
    kind: tuple[str, bool] = ("nf4", True)
    only: int | None = None
    """All choices on this expert."""
    dtype: torch.dtype = torch.float32


OSS = Gate("silu", interleaved=True, limit=0.7, alpha=1.7, shift=1.0)
CASES = {
    "plain": Case(),
    "interleaved": Case(gate=OSS, transposed=True, biased=True, ranks=(3, 20)),
    "tanh": Case(tokens=46, top_k=3, experts=4, hidden=72, inner=40, gate=Gate("gelu_tanh"),
                 transposed=True, ranks=(0, 4)),
    "gelu": Case(tokens=46, top_k=3, experts=4, hidden=72, inner=40, gate=Gate("gelu"),
                    biased=True, ranks=(4, 0)),
    "one-expert": Case(tokens=33, experts=4, hidden=64, inner=64, gate=Gate("relu2", gated=False),
                       biased=True, ranks=(1, 33), only=3),
    "int8": Case(tokens=1, experts=3, hidden=16, inner=136, gate=Gate("silu", limit=1.0),
                 ranks=(8, 8), kind=("int8", False)),
    "no-lora": Case(tokens=9, experts=3, hidden=16, inner=16, gate=Gate("relu", gated=False),
                    transposed=True, ranks=(0, 0), kind=("fp4", False)),
    "high-rank": Case(experts=3, ranks=(128, 1)),
    "few": Case(experts=3, hidden=64, inner=128, biased=True),
    "few-one-lora": Case(tokens=46, experts=2, hidden=128, inner=128, ranks=(3, 0),
                        kind=("fp4", True)),
    "few-transposed": Case(experts=3, hidden=128, inner=64, gate=OSS, transposed=True, biased=True,
                           ranks=(0, 5)),
    "few-wide-tiles": Case(tokens=150, top_k=2, experts=3, hidden=64, inner=64, ranks=(2, 2)),
    "few-int8": Case(tokens=20, experts=3, hidden=48, inner=72, kind=("int8", False)),
    "few-int8-transposed": Case(experts=3, hidden=72, inner=136, transposed=True,
                                kind=("int8", False)),
    # sizes in whole blocks of 32 and not of 64
    "mxfp4": Case(hidden=32, inner=96, gate=OSS, biased=True, kind=("mxfp4", False)),
    "few-mxfp4": Case(experts=3, hidden=96, inner=32, gate=OSS, biased=True, ranks=(3, 5),
                      kind=("mxfp4", False)),
    "few-mxfp4-transposed": Case(experts=3, hidden=64, inner=160, transposed=True,
                                 kind=("mxfp4", False)),
    "few-mxfp4-wide-tiles": Case(tokens=150, experts=3, hidden=64, inner=96, ranks=(2, 0),
                                 kind=("mxfp4", False)),
    "few-plain-absmax": Case(tokens=1, experts=2, hidden=128, inner=64, kind=("nf4", False)),
}  # fmt: skip


def build(case, seed=0):
    torch.manual_seed(seed)
    width = 2 * case.inner if case.gate.gated else case.inner

    def shape(out, inp):
        return (case.experts, *((inp, out) if case.transposed else (out, inp)))

    stacks = [stack_of(shape(*sizes), *case.kind, case.dtype) for sizes in
              ((width, case.hidden), (case.hidden, case.inner))]  # fmt: skip
    x = torch.randn(case.tokens, case.hidden).to(case.dtype).requires_grad_()
    weights = torch.rand(case.tokens, case.top_k).to(case.dtype).requires_grad_()
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(case.tokens)])
    if case.only is not None:
        index = torch.full_like(index, case.only)

    def lora(rank, inp, out):
        if not rank:
            return None
        a, b = torch.randn(case.experts * rank, inp), torch.randn(out, rank * case.experts)
        a, b = ((t * 0.2).to(case.dtype).requires_grad_() for t in (a, b))
        return Lora(a, b, 0.75)

    loras = lora(case.ranks[0], case.hidden, width), lora(case.ranks[1], case.inner, case.hidden)
    biases = None, None
    if case.biased:
        sizes = width, case.hidden
        biases = tuple(torch.randn(case.experts, n).to(case.dtype) for n in sizes)
    made = Layer(*stacks, case.transposed, case.gate, case.dtype)
    return made, stacks, x, weights, index, biases, loras


def slow(made, stacks, x, weights, index, biases, loras):
    """Decoded W + s B A, all experts for all tokens."""
    y = x
    for place, (stack, bias, term) in enumerate(zip(stacks, biases, loras, strict=True)):
        weight = codec.unpack(stack)
        weight = weight.mT if made.transposed else weight  # (E, out, in)
        if term is not None:
            a, b = term.a.view(len(weight), -1, term.a.shape[1]), term.b
            delta = torch.einsum("ore,eri->eoi", b.view(len(b), -1, len(weight)), a)
            weight = weight + delta * term.scaling
        y = y @ weight.mT
        y = y if bias is None else y + bias[:, None]
        y = backend.plain_gate(y, *made.gate) if place == 0 else y
    chosen = y[index, torch.arange(len(x))[:, None]]  # (T, k, out)
    return (chosen * weights[..., None]).sum(1)


def close(ours, theirs, tolerance=2e-5):
    assert ours.shape == theirs.shape
    error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-9)
    assert error < tolerance, float(error)


def check_layer(case):
    made, stacks, x, weights, index, biases, loras = build(case)
    leaves = [x, weights, *(t for term in loras if term for t in (term.a, term.b))]
    expected = slow(made, stacks, x, weights, index, biases, loras)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad)
    with torch.no_grad():
        operands = moe_layer.Operands(x, weights, biases, loras)
        state = moe_layer.gate_up_forward(made, index, operands)
        out = moe_layer.down_forward(made, state)
        ours = moe_layer.backward(made, state.routing, state.saved, grad, operands)
    close(out, expected)
    flat = [g for g in ours if g is not None]
    for mine, right in zip(flat, gradients, strict=True):
        close(mine, right)
