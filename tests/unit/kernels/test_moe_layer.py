"""The Triton kernels in its interpreter, in fp32, against plain loops: every path and gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moe_qlora.experts import activation, operators
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings
from tests.helpers.mxfp4 import mxfp4_weight

triton = pytest.importorskip("triton")
from moe_qlora.kernels import (  # noqa: E402
    autotune,
    cards,
    dequantize,
    expert_mm,
    limits,
    moe_layer,
    quantized_config,
    quantized_mm,
    quantized_mm_registers,
    workspace,
)
from moe_qlora.kernels import routing as routing_  # noqa: E402
from moe_qlora.kernels.moe_layer import Layer, Lora  # noqa: E402
from moe_qlora.kernels.row_launches import Gate  # noqa: E402
from moe_qlora.kernels.weights import WeightSpec  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False), ("int8", False)]


pytestmark = pytest.mark.usefixtures("interpreted")


def stack_of(shape, kind, double, dtype=torch.float32):
    if kind == "mxfp4":
        return mxfp4_weight(*shape, dtype=dtype)
    storage = torch.int8 if kind == "int8" else torch.uint8
    return codec.pack(torch.randn(shape).to(dtype) * 0.2, CodecSettings(kind, double, storage))


@pytest.mark.parametrize(
    ("kind", "double", "shape"),
    [
        *((*kind, shape) for kind in KINDS for shape in [(3, 24, 40), (4, 64, 128), (2, 17, 8)]),
        ("mxfp4", False, (3, 17, 96)),
        ("mxfp4", False, (5, 24, 32)),
    ],
)
@pytest.mark.parametrize("apart", [0, 24])
def test_decode_equals_the_codec(kind, double, shape, apart):
    torch.manual_seed(0)
    stack = stack_of(shape, kind, double)
    experts, rows, cols = shape
    right, below = torch.randn(rows, 16, experts).permute(2, 0, 1), torch.randn(experts, 32, cols)
    wide = torch.full((experts, rows + 32, cols + 16 + apart), float("nan"))
    out = wide[:, :, : cols + 16]
    offsets = torch.tensor([0, 2] + [5] * (experts - 1), dtype=torch.int32)
    live = [e for e in range(experts) if offsets[e] < offsets[e + 1]]
    dequantize.decode(stack, out, expert_offsets=offsets, right=right, below=below)
    expected = codec.unpack(stack)
    for e in range(experts):
        if e not in live:
            assert out[e].isnan().all()
            continue
        assert torch.equal(out[e, :rows, :cols], expected[e])
        assert torch.equal(out[e, :rows, cols:], right[e])
        assert torch.equal(out[e, rows:, :cols], below[e])
        assert wide[e, :, cols + 16 :].isnan().all()
    part = torch.full((experts - 1, rows, cols), float("nan"))
    dequantize.decode(stack, part, first=1)
    assert torch.equal(part, expected[1:])


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
    "tanh": Case(tokens=46, top_k=3, experts=4, hidden=72, inner=40, gate=Gate("gelu_tanh"),
                 transposed=True, ranks=(0, 4)),
    "partial": Case(tokens=46, top_k=3, experts=4, hidden=72, inner=40, gate=Gate("gelu"),
                    biased=True, ranks=(4, 0), partial=True),
    "one-expert": Case(tokens=33, experts=4, hidden=64, inner=64, gate=Gate("relu2", gated=False),
                       biased=True, ranks=(1, 33), only=3),
    "int8": Case(tokens=1, experts=3, hidden=16, inner=136, gate=Gate("silu", limit=1.0),
                 ranks=(8, 8), kind=("int8", False)),
    "no-lora": Case(tokens=9, experts=3, hidden=16, inner=16, gate=Gate("relu", gated=False),
                    transposed=True, ranks=(0, 0), kind=("fp4", False), partial=True),
    "high-rank": Case(experts=3, ranks=(128, 1)),
    "few": Case(experts=3, hidden=64, inner=128, biased=True),
    "few-partial": Case(tokens=46, experts=2, hidden=128, inner=128, ranks=(3, 0), partial=True,
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
    "few-mxfp4-transposed": Case(experts=3, hidden=64, inner=160, transposed=True, partial=True,
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

    stacks = [stack_of(shape(*sizes), *case.kind) for sizes in
              ((width, case.hidden), (case.hidden, case.inner))]  # fmt: skip
    x = torch.randn(case.tokens, case.hidden, requires_grad=True)
    weights = torch.rand(case.tokens, case.top_k, requires_grad=True)
    index = torch.stack([torch.randperm(case.experts)[: case.top_k] for _ in range(case.tokens)])
    if case.only is not None:
        index = torch.full_like(index, case.only)
    if case.partial:
        index[::3, 0], index[::6, 0] = case.experts + 2, -1

    def lora(rank, inp, out):
        if not rank:
            return None
        a, b = torch.randn(case.experts * rank, inp) * 0.2, torch.randn(out, rank * case.experts)
        return Lora(a.requires_grad_(), (b * 0.2).requires_grad_(), 0.75)

    loras = lora(case.ranks[0], case.hidden, width), lora(case.ranks[1], case.inner, case.hidden)
    biases = None, None
    if case.biased:
        biases = torch.randn(case.experts, width), torch.randn(case.experts, case.hidden)
    made = Layer(*stacks, case.transposed, case.partial, case.gate, torch.float32)
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
        h = activation.plain_gate(pre, *made.gate)
        y = h @ w2[e].t() + lora(loras[1], e, h)
        if biases[1] is not None:
            y = y + biases[1][e]
        out = out.index_add(0, token, y * weights[token, slot][:, None])
    return out


def close(ours, theirs, tolerance=2e-5):
    assert ours.shape == theirs.shape
    error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-9)
    assert error < tolerance, float(error)


def forbid_decoding(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("decoded")

    monkeypatch.setattr(dequantize, "decode", forbidden)


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_plain_loops(name, monkeypatch):
    if name.startswith("few"):
        forbid_decoding(monkeypatch)
    check_layer(CASES[name])


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


@pytest.mark.usefixtures("own_grouped_mm")
@pytest.mark.parametrize("name", ["plain", "interleaved", "partial", "high-rank", "few-int8"])
def test_the_own_grouped_matmul(name, monkeypatch):
    monkeypatch.setattr(expert_mm, "few_rows", lambda *args, **kwargs: False)
    check_layer(CASES[name])


# Those whose stacks are cut into slices; and two of smaller ones, whose rows are cut into pieces.
SLICED = ["mxfp4", "tanh", "partial", "int8", "few-transposed", "interleaved", "no-lora"]


@pytest.mark.parametrize(
    ("name", "few"),
    [
        *((name, False) for name in SLICED),
        *((name, True) for name in ("few", "few-transposed", "few-mxfp4")),
    ],
)
def test_capped_scratch_in_slices_and_pieces(name, few, monkeypatch):
    case = CASES[name]
    if not few:
        monkeypatch.setattr(expert_mm, "few_rows", lambda *args, **kwargs: False)
    sliced = []
    real = expert_mm._slice
    monkeypatch.setattr(expert_mm, "_slice", lambda *a: sliced.append(a[2]) or real(*a))
    workspace.set_workspace_cap(1)
    try:
        check_layer(case)
        assert workspace.held_bytes() < 2**20
    finally:
        workspace.set_workspace_cap(None)
    assert few or max(case.hidden, case.inner) <= 64 or sliced


@pytest.mark.usefixtures("own_grouped_mm")
@pytest.mark.parametrize("name", ["tanh", "few-transposed"])
def test_slices_by_the_own_grouped_matmul(name, monkeypatch):
    test_capped_scratch_in_slices_and_pieces(name, False, monkeypatch)


@pytest.mark.parametrize("name", ["plain", "interleaved", "partial"])
def test_rows_any_distance_apart(name, monkeypatch):
    """As of wide rows, which start at whole lines."""
    monkeypatch.setattr(expert_mm, "few_rows", lambda *args, **kwargs: False)
    for module in (moe_layer, expert_mm):
        monkeypatch.setattr(module, "row_stride", lambda width, *args, **kwargs: width + 24)
    check_layer(CASES[name])


def test_a_cap_keeps_what_is_decoded_and_copied_below_it(monkeypatch):
    case = Case(tokens=70, experts=2, hidden=128, inner=128, gate=Gate("relu2", gated=False))
    monkeypatch.setattr(expert_mm, "few_rows", lambda *args, **kwargs: False)
    copied = []
    real = moe_layer._copied
    monkeypatch.setattr(moe_layer, "_copied", lambda *a: copied.append(real(*a)) or copied[-1])
    cap = 2 * 4 * (128 + 16) * 64
    workspace.set_workspace_cap(cap)
    try:
        check_layer(case)
        assert 0 < workspace.held_bytes() <= cap
    finally:
        workspace.set_workspace_cap(None)
    assert len(copied) > 2 and max(piece.nbytes for piece in copied) <= cap


@pytest.mark.parametrize("cap", [None, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("few")])
def test_the_quantized_matmul_fetches_rows_itself(name, cap, monkeypatch):
    """As on Hopper: nobody copies the tokens' rows in order."""
    fetched = []
    monkeypatch.setattr(moe_layer, "gathers", lambda m, *_: fetched.append(m) or m.on_quantized)
    monkeypatch.setattr(moe_layer, "_copied", lambda *_: pytest.fail("copied"))
    workspace.set_workspace_cap(cap)
    try:
        check_layer(CASES[name])
    finally:
        workspace.set_workspace_cap(None)
    assert len(fetched) == 2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", [SILU, Gate("relu2", gated=False)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_in_the_order_of_registers(gate, biased, transposed, monkeypatch):
    """As Hopper's kernel that holds weights in registers takes them; another one multiplies."""
    case = Case(
        tokens=40, experts=3, hidden=512, inner=512, gate=gate, biased=biased, transposed=transposed
    )
    real, restored = quantized_mm.launch, []

    def launch(x, packed, factor, absmax, offsets, tiles, tile, config, **options):
        if config == quantized_config.REGISTERS:
            columns = packed.spec.shape[2]
            assert not options["back"] and x.shape[1] in (columns, columns + 16)
            x, config = quantized_mm_registers.restore(x, columns), CONFIGS[1]
            restored.append(columns)
        return real(x, packed, factor, absmax, offsets, tiles, tile, config, **options)

    monkeypatch.setattr(quantized_mm, "launch", launch)
    monkeypatch.setattr(quantized_mm, "in_registers", lambda *_, back: not back)
    monkeypatch.setattr(limits, "ROWS_IN_REGISTERS", (1, 1024))
    monkeypatch.setattr(moe_layer, "reorder", reordered)
    check_layer(case)
    assert restored == ([] if transposed else [512, 512])


def reordered(x):
    """By its definition: column 256 b + 64 g + 2 i + j comes at 256 b + 8 i + 2 g + j."""
    out = torch.empty_like(x)
    for column in range(x.shape[1]):
        b, rest = divmod(column, 256)
        g, i, j = rest // 64, rest % 64 // 2, rest % 2
        out[:, 256 * b + 8 * i + 2 * g + j] = x[:, column]
    return out


def test_reordered_columns_and_back():
    x = torch.randn(37, 512).bfloat16()
    ours = quantized_mm_registers.reorder(x)
    assert torch.equal(ours, reordered(x))
    tail = torch.randn(37, 16).bfloat16()
    back = quantized_mm_registers.restore(torch.cat([ours, tail], 1), 512)
    assert torch.equal(back, torch.cat([x, tail], 1))


def test_which_matmuls_hold_weights_in_registers(monkeypatch):
    """Out alone, of as many rows an expert as suit, in whole groups of 256 columns."""
    monkeypatch.setattr(quantized_mm, "_registers_work", {-1: True})
    monkeypatch.setattr(limits, "ROWS_IN_REGISTERS", (128, 200))
    bf16 = torch.bfloat16
    for columns, kind, many, by_rows, taken in [
        (512, ("nf4", True), 130, True, True),
        (512, ("fp4", False), 130, True, True),
        (512, ("nf4", True), 127, True, False),
        (512, ("nf4", True), 201, True, False),
        (512, ("nf4", True), 130, False, False),
        (320, ("nf4", True), 130, True, False),
        (256, ("nf4", True), 130, True, False),
        (512, ("int8", False), 130, True, False),
        (512, ("mxfp4", False), 130, True, False),
    ]:
        packed = stack_of((2, 128, columns), *kind)
        count = 2 * many
        quantized = expert_mm.runs_quantized(packed, count, bf16, back=not by_rows)
        assert quantized or many > limits.ROWS_ON_QUANTIZED or not taken
        routing = routing_.route(torch.arange(count)[:, None] % 2, 2)
        matmul = expert_mm.ExpertMatmul(packed, None, by_rows, False, True, bf16)
        config, tiles, tile = expert_mm.quantized_cut(matmul, routing, True)
        assert (config == quantized_config.REGISTERS) == taken, (columns, kind, many, by_rows)
        assert tile == (limits.WIDEST_TILE if taken else limits.WIDE_TILE)
        assert expert_mm.reorders(matmul, routing) == taken
        assert not taken or tiles is routing.widest
    on_all = expert_mm.runs_quantized(packed, 4 * 10**6, bf16, back=False)
    assert not on_all


def test_kernels_that_do_not_compile_are_not_tried_again(monkeypatch):
    """What `launch` falls back to is right, which says nothing about Hopper's own kernels."""
    hopper = cards.Card("nvidia", cards.HOPPER, 232448)
    monkeypatch.setattr(cards, "actual", lambda device: hopper)
    monkeypatch.setattr(quantized_mm, "_hopper_works", {})
    monkeypatch.setattr(quantized_mm, "_registers_work", {})
    spec = WeightSpec((2, 192, 512), "nf4", 64, 0, 0)

    def falls_back(device, kind, tile, config):
        quantized_mm._give_up(config, spec, RuntimeError())
        return True

    monkeypatch.setattr(quantized_mm, "_is_right", falls_back)
    with pytest.warns(UserWarning, match="does not compile"):
        quantized_mm.prepare(torch.device("cuda", 0))
    assert not quantized_mm.on_hopper(spec, torch.bfloat16, back=False)
    assert not quantized_mm.in_registers(spec, torch.bfloat16, back=False)


@pytest.mark.parametrize("gathers", [False, True])
def test_what_does_not_compile_is_multiplied_in_order(gathers, monkeypatch):
    """The portable kernel takes over a product whose rows are in the order of registers."""
    monkeypatch.setattr(quantized_mm, "_registers_work", {-1: True})
    monkeypatch.setattr(quantized_mm_registers, "step", lambda *_: refused)
    packed = stack_of((3, 72, 512), "nf4", False)
    index = torch.randint(4, (90, 2))  # of which 3 is held elsewhere
    routing = routing_.route(index, 3)
    tokens, products = torch.randn(90, 512), torch.randn(180 * 16)
    factor = torch.randn(3, 72, 16)
    order = routing.order[:180].long()
    rows = torch.cat([tokens[order // 2], products.view(180, 16)], 1)
    x, gather = torch.cat([reordered(rows[:, :512]), rows[:, 512:]], 1), None
    if gathers:
        x, gather = reordered(tokens), quantized_config.Gather(routing.order, products, 2, 180)
    with pytest.warns(UserWarning, match="does not compile"):
        y = quantized_mm.launch(
            x, packed, factor, None, routing.expert_offsets, routing.widest, limits.WIDEST_TILE,
            quantized_config.REGISTERS, back=False, span=(0, 72), gather=gather,
        )  # fmt: skip
    weight, offsets = codec.unpack(packed), routing.expert_offsets.tolist()
    for e in range(3):
        some = rows[offsets[e] : offsets[e + 1]]
        close(y[offsets[e] : offsets[e + 1]], some @ torch.cat([weight[e], factor[e]], 1).t())
    assert not quantized_mm._registers_work[-1]


def refused(*_):
    raise RuntimeError("refused")


CONFIGS = [quantized_mm.Config(128, 64, 2, 4, True), quantized_mm.Config(64, 128, 2, 4, False)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(("few-transposed", config) for config in CONFIGS),
        ("few", CONFIGS[0]),
        ("few-partial", CONFIGS[1]),
        ("few-plain-absmax", CONFIGS[1]),
        *(("few-mxfp4", config) for config in CONFIGS),
        *(("few-mxfp4-transposed", config) for config in CONFIGS),
    ],
)
def test_few_tokens_in_every_configuration(name, config, monkeypatch):
    monkeypatch.setattr(autotune, "chosen", lambda *args, **kwargs: config)
    check_layer(CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("few")])
def test_many_tokens_decode(name, monkeypatch):
    """What `test_layer_equals_plain_loops` forbids of few tokens would be noticed there."""
    forbid_decoding(monkeypatch)
    monkeypatch.setattr(expert_mm, "few_rows", lambda *args, **kwargs: False)
    with pytest.raises(AssertionError, match="decoded"):
        check_layer(CASES[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_each_matrix_is_decoded(kind):
    stack = stack_of((3, 40, 72), *kind)
    whole = codec.unpack(stack)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    right, below = torch.randn(3, 16, 16), torch.randn(3, 16, 24)
    for corner, height, width in [((8, 0), 16, 72), ((0, 24), 40, 24), ((11, 16), 16, 24)]:
        out = torch.full((3, height + 16, width), float("nan"))
        under = below if width == 24 else torch.zeros(3, 16, width)
        dequantize.decode(stack, out, corner=corner, expert_offsets=offsets, below=under)
        for e in (0, 2):
            part = whole[e, corner[0] : corner[0] + height, corner[1] : corner[1] + width]
            assert torch.equal(out[e, :height], part)
        assert out[1].isnan().all()
    out = torch.empty(3, 16, 72 + 16)
    dequantize.decode(stack, out, corner=(8, 0), right=right)
    assert torch.equal(out[:, :, :72], whole[:, 8:24]) and torch.equal(out[:, :, 72:], right)


@pytest.mark.parametrize("shape", [(1, 1), (37, 3), (200, 2), (400, 2), (1500, 3), (22000, 3)])
def test_routing(shape):
    experts = 5
    index = torch.randint(experts + 1, shape)
    routing = routing_.route(index, experts)
    flat = index.reshape(-1)
    order, inverse = routing.order[: flat.numel()].long(), routing.inverse[: flat.numel()].long()
    assert routing.expert_offsets[: experts + 1].tolist() == [
        int((flat < e).sum()) for e in range(experts + 1)
    ]
    assert torch.equal(order, flat.sort(stable=True).indices)
    assert torch.equal(inverse[order], torch.arange(flat.numel()))
    assert torch.equal(routing.ends, routing.expert_offsets[1 : experts + 1])
    tables = [(routing.tiles, routing.tile)]
    assert (routing.counts[1] > 0) == (routing.tile == limits.TILE)
    if routing.counts[1]:
        tables.append((routing.wide, limits.WIDE_TILE))
        tables.append((routing.widest, limits.WIDEST_TILE))
    for table, tile in tables:
        rows = [[] for _ in range(experts)]
        for expert, start in table.view(-1, 2).tolist():
            if expert >= 0:
                end = min(start + tile, int(routing.expert_offsets[expert + 1]))
                rows[expert] += range(start, end)
        for e in range(experts):
            assert rows[e] == list(
                range(int(routing.expert_offsets[e]), int(routing.expert_offsets[e + 1]))
            )
            assert (flat[order[rows[e]]] == e).all()


def test_scratch_remembers_its_owner():
    first, held = workspace.take("first", (2, 8), torch.float32, torch.device("cpu"), ("a",))
    assert not held and first.shape == (2, 8)
    again, held = workspace.take("first", (2, 8), torch.float32, torch.device("cpu"), ("a",))
    assert held and again.data_ptr() == first.data_ptr()
    assert workspace.holds("first", torch.device("cpu"), ("a",))
    _, held = workspace.take("first", (2, 8), torch.float32, torch.device("cpu"), ("b",))
    assert not held
    _, held = workspace.take("first", (2, 8), torch.float32, torch.device("cpu"))
    assert not held and not workspace.holds("first", torch.device("cpu"), None)
    _, held = workspace.take("first", (400, 8), torch.float32, torch.device("cpu"), ("b",))
    assert not held


@pytest.mark.parametrize(("tokens", "transposed"), [(2, False), (20, True), (45, False)])
def test_the_compiler_is_told_the_right_shapes(tokens, transposed):
    """What the custom operators promise is what they give, whatever the size of tiles."""
    case = Case(experts=2, hidden=64, inner=64, transposed=transposed, ranks=(3, 0))
    made, stacks, *_ = build(case)
    x = torch.randn(tokens, 64, dtype=torch.float16)
    index = torch.rand(tokens, 2).topk(2, -1).indices
    weights = torch.rand(tokens, 2, dtype=torch.float16)
    lora = [torch.randn(2 * 3, 64).half(), torch.randn(128, 3 * 2).half()]
    packed, numbers = [], []
    for stack in stacks:
        nested = stack.nested
        inner = [nested.offset, nested.absmax, nested.table]
        packed += [stack.codes, stack.absmax, stack.table, *inner]
        numbers.append([0, 64, nested.blocksize, *stack.shape])
    act, gated, interleaved, _, alpha, shift = made.gate
    constants = (
        *numbers, act, [gated, interleaved], [alpha, shift], [True, False], [0.5],
        case.transposed, False,
    )  # fmt: skip
    arguments = x, weights, index, [], lora, packed, *constants
    real, promised = operators._layer_forward(*arguments), operators._layer_forward_fake(*arguments)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in promised]
    later = x, x, weights, [], lora, packed, real[1:], True, *constants
    real, promised = operators._layer_backward(*later), operators._layer_backward_fake(*later)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in promised]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_kernel_is_tried_before_it_is_used(kind, monkeypatch):
    device, config = torch.device("cpu"), quantized_mm.Config(64, 64, 2, 4, False)
    assert quantized_mm._is_right(device, kind, 32, config)
    real = quantized_mm.launch
    monkeypatch.setattr(
        quantized_mm, "launch", lambda *a, **k: real(*a, **k).mul_(1 + 1e-2 * k["back"])
    )
    assert not quantized_mm._is_right(device, kind, 32, config)
    monkeypatch.setattr(quantized_mm, "launch", lambda *a, **k: 1 / 0)
    assert not quantized_mm._is_right(device, kind, 32, config)
