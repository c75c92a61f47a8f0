"""The Triton kernels in its interpreter, in fp32, against plain loops: every path and gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moe_qlora import codec, experts_layer
from moe_qlora.codec_settings import CodecSettings
from moe_qlora.experts_op import packed_of

triton = pytest.importorskip("triton")
from triton.runtime import interpreter  # noqa: E402

from moe_qlora.kernels import decode, fused, layer, scratch, tune  # noqa: E402
from moe_qlora.kernels.layer import Gate, Layer, Lora  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False), ("int8", False)]


@pytest.fixture(autouse=True)
def _numpy_scalars(monkeypatch):
    """Triton 3.6's interpreter takes int() of arrays of one element, which NumPy 2.4 refuses."""
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        first = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])  # noqa: E731
        scope.set_attr(tensor, "__index__", first)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    scratch.release_scratch()
    yield
    scratch.release_scratch()


def stack_of(shape, kind, double, dtype=torch.float32):
    storage = torch.int8 if kind == "int8" else torch.uint8
    return codec.pack(torch.randn(shape).to(dtype) * 0.2, CodecSettings(kind, double, storage))


@pytest.mark.parametrize(("kind", "double"), KINDS)
@pytest.mark.parametrize("shape", [(3, 24, 40), (4, 64, 128), (2, 17, 8)])
def test_decode_equals_the_codec(kind, double, shape):
    torch.manual_seed(0)
    stack = stack_of(shape, kind, double)
    experts, rows, cols = shape
    right, below = torch.randn(rows, 16, experts).permute(2, 0, 1), torch.randn(experts, 32, cols)
    out = torch.full((experts, rows + 32, cols + 16), float("nan"))
    bounds = torch.tensor([0, 2] + [5] * (experts - 1), dtype=torch.int32)
    live = [e for e in range(experts) if bounds[e] < bounds[e + 1]]
    decode.decode(packed_of(stack), out, bounds=bounds, right=right, below=below)
    expected = codec.unpack(stack)
    for e in range(experts):
        if e not in live:
            assert out[e].isnan().all()
            continue
        assert torch.equal(out[e, :rows, :cols], expected[e])
        assert torch.equal(out[e, :rows, cols:], right[e])
        assert torch.equal(out[e, rows:, :cols], below[e])
    part = torch.full((experts - 1, rows, cols), float("nan"))
    decode.decode(packed_of(stack), part, first=1)
    assert torch.equal(part, expected[1:])


@pytest.mark.parametrize(("kind", "double"), KINDS[:4])
@pytest.mark.parametrize("span", [(0, 51), (3, 50), (50, 51), (13, 14)])
def test_decodes_any_range_of_any_stack(kind, double, span):
    stack = stack_of((3, 17), kind, double)  # odd rows: no groups of 8, a half byte at the end
    packed = packed_of(stack)._replace(shape=(1, 3, 17))
    out = torch.full((span[1] - span[0],), float("nan"))
    decode.decode_flat(packed, out, span[0])
    assert torch.equal(out, codec.unpack(stack).view(-1)[span[0] : span[1]])


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
    partial: bool = False
    only: int | None = None
    """All choices on this expert."""


OSS = Gate("silu", interleaved=True, limit=0.7, alpha=1.7, shift=1.0)
CASES = {
    "plain": Case(),
    "interleaved": Case(gate=OSS, transposed=True, biased=True, ranks=(3, 20)),
    "tanh": Case(tokens=70, top_k=3, hidden=72, inner=40, gate=Gate("gelu_tanh"), transposed=True,
                 ranks=(0, 4)),
    "partial": Case(tokens=70, top_k=3, hidden=72, inner=40, gate=Gate("gelu"), biased=True,
                    ranks=(4, 0), partial=True),
    "one-expert": Case(tokens=33, experts=4, hidden=64, inner=64, gate=Gate("relu2", gated=False),
                       biased=True, ranks=(1, 33), only=3),
    "int8": Case(tokens=1, experts=3, hidden=16, inner=136, gate=Gate("silu", limit=1.0),
                 ranks=(8, 8), kind=("int8", False)),
    "no-lora": Case(tokens=9, experts=3, hidden=16, inner=16, gate=Gate("relu", gated=False),
                    transposed=True, ranks=(0, 0), kind=("fp4", False), partial=True),
    "high-rank": Case(experts=3, ranks=(128, 1)),
    "few": Case(hidden=64, inner=128, biased=True),
    "few-partial": Case(tokens=70, experts=3, hidden=128, inner=192, ranks=(3, 0), partial=True,
                        kind=("fp4", True)),
    "few-plain-absmax": Case(tokens=1, experts=3, hidden=128, inner=64, kind=("nf4", False)),
}  # fmt: skip


def build(case, seed=0):
    torch.manual_seed(seed)
    width = 2 * case.inner if case.gate.gated else case.inner

    def shape(out, inp):
        return (case.experts, *((inp, out) if case.transposed else (out, inp)))

    stacks = [stack_of(shape(*sizes), *case.kind) for sizes in
              ((width, case.hidden), (case.hidden, case.inner))]  # fmt: skip
    x = torch.randn(case.tokens, case.hidden, requires_grad=True)
    weights = torch.rand(case.tokens, case.top_k, requires_grad=True)
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(case.tokens)])
    if case.only is not None:
        index = torch.full_like(index, case.only)
    if case.partial:
        index[::3, 0] = case.experts + 2

    def lora(rank, inp, out):
        if not rank:
            return None
        a, b = torch.randn(case.experts * rank, inp) * 0.2, torch.randn(out, rank * case.experts)
        return Lora(a.requires_grad_(), (b * 0.2).requires_grad_(), 0.75)

    loras = lora(case.ranks[0], case.hidden, width), lora(case.ranks[1], case.inner, case.hidden)
    biases = None, None
    if case.biased:
        biases = torch.randn(case.experts, width), torch.randn(case.experts, case.hidden)
    made = Layer(*map(packed_of, stacks), case.transposed, case.partial, case.gate, torch.float32)
    return made, stacks, x, weights, index, biases, loras


def slow(made, stacks, x, weights, index, biases, loras):
    """Expert by expert, decoded."""
    w1, w2 = (codec.unpack(stack) for stack in stacks)
    if made.transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)

    def lora(term, e, v):
        if term is None:
            return 0
        a = term.a.view(len(w1), -1, term.a.shape[-1])[e]
        return (v @ a.t()) @ term.b.view(term.b.shape[0], -1, len(w1))[:, :, e].t() * term.scaling

    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = torch.where(index == e)
        v = x[token]
        pre = v @ w1[e].t() + lora(loras[0], e, v)
        if biases[0] is not None:
            pre = pre + biases[0][e]
        h = experts_layer.plain_gate(pre, *made.gate)
        y = h @ w2[e].t() + lora(loras[1], e, h)
        if biases[1] is not None:
            y = y + biases[1][e]
        out = out.index_add(0, token, y * weights[token, slot][:, None])
    return out


def close(ours, theirs, tolerance=2e-5):
    assert ours.shape == theirs.shape
    error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-9)
    assert error < tolerance, float(error)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layer_equals_plain_loops(case):
    made, stacks, x, weights, index, biases, loras = build(case)
    leaves = [x, weights, *(t for term in loras if term for t in (term.a, term.b))]
    expected = slow(made, stacks, x, weights, index, biases, loras)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad)
    with torch.no_grad():
        routing = layer.route(index, case.experts)
        out, saved = layer.forward(made, routing, x, weights, index, *biases, *loras)
        ours = layer.backward(made, routing, saved, grad, x, weights, *biases, *loras)
    close(out, expected)
    flat = [g for g in ours if g is not None]
    for mine, right in zip(flat, gradients, strict=True):
        close(mine, right)


@pytest.mark.parametrize("name", ["plain", "interleaved", "one-expert", "partial"])
def test_capped_scratch_in_chunks_of_experts(name):
    case = CASES[name]
    for experts in (1, 2):
        scratch.set_scratch_cap(experts * 4 * (2 * case.inner + 64) * (case.hidden + 64))
        test_layer_equals_plain_loops(case)
    scratch.set_scratch_cap(None)


@pytest.mark.parametrize("unroll", [1, 2])
def test_few_tokens_in_every_configuration(unroll, monkeypatch):
    monkeypatch.setattr(tune, "DEFAULT", fused.Config(128, unroll, 2, 4))
    test_layer_equals_plain_loops(CASES["few"])
    test_layer_equals_plain_loops(CASES["few-partial"])


def test_few_tokens_take_the_fused_path(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("decoded")

    made, _, x, weights, index, biases, loras = build(CASES["few"])
    with torch.no_grad():
        routing = layer.route(index, made.first.experts)
        monkeypatch.setattr(decode, "decode", forbidden)
        layer.forward(made, routing, x, weights, index, *biases, *loras)
        monkeypatch.setattr(layer, "FEW", 0)
        with pytest.raises(AssertionError, match="decoded"):
            layer.forward(made, routing, x, weights, index, *biases, *loras)


@pytest.mark.parametrize("shape", [(1, 1), (37, 3), (200, 2)])
def test_routing(shape):
    experts = 5
    index = torch.randint(experts + 1, shape)
    routing = layer.route(index, experts)
    flat = index.reshape(-1)
    order = routing.order.long()
    assert torch.equal(order, flat.sort(stable=True).indices)
    assert torch.equal(routing.inverse.long()[order], torch.arange(flat.numel()))
    rows = [[] for _ in range(experts)]
    for expert, start in routing.tiles.tolist():
        if expert >= 0:
            end = min(start + routing.tile, int(routing.bounds[expert + 1]))
            rows[expert] += range(start, end)
    for e in range(experts):
        assert rows[e] == list(range(int(routing.bounds[e]), int(routing.bounds[e + 1])))
        assert (flat[order[rows[e]]] == e).all()


def test_scratch_remembers_its_owner():
    first, held = scratch.take("first", (2, 8), torch.float32, torch.device("cpu"), ("a",))
    assert not held and first.shape == (2, 8)
    again, held = scratch.take("first", (2, 8), torch.float32, torch.device("cpu"), ("a",))
    assert held and again.data_ptr() == first.data_ptr()
    assert scratch.holds("first", torch.device("cpu"), ("a",))
    _, held = scratch.take("first", (2, 8), torch.float32, torch.device("cpu"), ("b",))
    assert not held
    _, held = scratch.take("first", (2, 8), torch.float32, torch.device("cpu"))
    assert not held and not scratch.holds("first", torch.device("cpu"), None)
    _, held = scratch.take("first", (400, 8), torch.float32, torch.device("cpu"), ("b",))
    assert not held
