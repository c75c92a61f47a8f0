"""The Triton kernels in its interpreter, in fp32, beside plain products: paths and gradients."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_qlora.packing import codec

pytest.importorskip("triton")
from fused_layer import CASES, Case, check_layer, stack_of

from moe_qlora.kernels import (
    cards,
    grouped_mm,
    limits,
    moe_layer,
    quantized_mm,
    quantized_mm_hopper,
    quantized_mm_rs,
    table,
    workspace,
)
from moe_qlora.kernels.gate_kernels import Gate
from moe_qlora.kernels.table import Matmul
from moe_qlora.kernels.weights import WeightSpec

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("kind", "double", "shape"),
    [
        ("nf4", True, (3, 24, 40)),
        ("nf4", False, (2, 17, 8)),
        ("fp4", True, (4, 64, 128)),
        ("int8", False, (3, 24, 40)),
        ("mxfp4", False, (3, 17, 96)),
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
    grouped_mm.decode(stack, out, expert_offsets=offsets, right=right, below=below)
    expected = codec.unpack(stack)
    for e in range(experts):
        if offsets[e] == offsets[e + 1]:  # no rows
            assert out[e].isnan().all()
            continue
        assert torch.equal(out[e, :rows, :cols], expected[e])
        assert torch.equal(out[e, :rows, cols:], right[e])
        assert torch.equal(out[e, rows:, :cols], below[e])
        assert wide[e, :, cols + 16 :].isnan().all()
    whole = torch.full((experts, rows, cols), float("nan"))
    grouped_mm.decode(stack, whole)
    assert torch.equal(whole, expected)


def dequantize_all(monkeypatch):
    """Leave out the kernels on codes."""
    rows = [kernel for kernel in table.kernels() if not kernel.on_codes]
    monkeypatch.setattr(table, "KERNELS", rows)


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_plain_products(name, monkeypatch):
    if name.startswith("few"):  # Nothing is decoded
        monkeypatch.setattr(grouped_mm, "decode", lambda *args, **kwargs: 1 / 0)
    check_layer(CASES[name])


@pytest.mark.parametrize("name", ["plain", "interleaved", "gelu", "high-rank"])
def test_the_own_grouped_matmul_on_rows_any_distance_apart(name, monkeypatch):
    """As of wide rows, which start at whole lines; torch's is an error."""
    dequantize_all(monkeypatch)
    cut = grouped_mm.Cut(32, 32, 2, 4, 3)
    monkeypatch.setattr(cards, "multiplies_by_torch", lambda device, dtype: False)
    monkeypatch.setattr(grouped_mm, "default", lambda tile, device: cut)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *args, **kwargs: 1 / 0)
    for module in (moe_layer, grouped_mm):
        monkeypatch.setattr(module, "row_stride", lambda width, *args, **kwargs: width + 24)
    check_layer(CASES[name])


# Those whose stacks are cut into slices; and some of smaller ones.
@pytest.mark.parametrize("name", ["mxfp4", "tanh", "int8", "no-lora", "few", "few-mxfp4"])
def test_capped_workspace_in_slices(name, monkeypatch):
    case, few = CASES[name], name.startswith("few")
    if not few:
        dequantize_all(monkeypatch)
    sliced, real = [], table.Matmul.spans

    def spans(matmul):
        found = list(real(matmul))
        sliced.extend(found if len(found) > 1 else ())
        return iter(found)

    monkeypatch.setattr(table.Matmul, "spans", spans)
    workspace.set_workspace_cap(1)
    try:
        check_layer(case)
        assert sum(buffer.nbytes for buffer in workspace.buffers(torch.device("cpu"))) < 2**20
    finally:
        workspace.set_workspace_cap(None)
    assert few or max(case.hidden, case.inner) <= 64 or sliced


# Which kernels a layer takes, and rows as Hopper's own take them.

RS, HOPPER = (module.KERNEL for module in (quantized_mm_rs, quantized_mm_hopper))
HOPPER_CARD = cards.Card("nvidia", cards.HOPPER, 227 << 10)


def test_rows_in_the_order_of_registers(monkeypatch):
    """As Hopper's kernel that holds weights in registers takes them; another one multiplies."""
    gate, restored = Gate("relu2", gated=False), []
    case = Case(tokens=33, experts=2, hidden=512, inner=512, gate=gate, biased=True)

    def launch(x, matmul, absmax, routing, span, products=None):
        columns = matmul.packed.spec.shape[2]
        assert matmul.by_rows and x.shape[1] in (columns, columns + 16)
        restored.append(columns)
        tile = matmul.tile
        other = matmul._replace(cut=quantized_mm.Config(64, 128, 2, 4), tile=tile)
        x = torch.cat([restored_order(x[:, :columns]), x[:, columns:]], 1)
        return quantized_mm.launch(x, other, absmax, routing, span, products)

    def supports(matmul):
        return RS.supports(matmul._replace(dtype=torch.bfloat16))

    stand_in = replace(RS, supports=supports, launch=launch, reorder=reordered, hopper=False)
    monkeypatch.setattr(table, "KERNELS", [stand_in, *table.kernels()])
    monkeypatch.setattr(quantized_mm_rs, "ROWS_IN_REGISTERS", (1, 1024))
    check_layer(case)
    assert restored == [512, 512]
    x = torch.randn(37, 512).bfloat16()
    assert torch.equal(quantized_mm_rs.reorder(x), reordered(x))


def reordered(x, out=None):
    """By its definition: column 256 b + 64 g + 2 i + j comes at 256 b + 8 i + 2 g + j."""
    out = torch.empty_like(x) if out is None else out
    for column in range(x.shape[1]):
        b, rest = divmod(column, 256)
        g, i, j = rest // 64, rest % 64 // 2, rest % 2
        out[:, 256 * b + 8 * i + 2 * g + j] = x[:, column]
    return out


def restored_order(x):
    places = reordered(torch.arange(x.shape[1])[None].float()).long()
    return torch.empty_like(x).index_copy_(1, places[0], x)


@pytest.mark.parametrize(
    ("each", "reused", "taken"),
    [(21, False, False), (22, False, True), (512, False, True), (513, False, False),
     (256, True, True), (257, True, False)],
)  # fmt: skip
def test_which_matmuls_hopper_takes(each, reused, taken, monkeypatch):
    """In whole tiles, up to fewer rows where a dequantized weight would serve two products."""
    columns = Matmul(stack_of((4, 512, 512), "nf4", True), torch.bfloat16, 4 * each, False)
    assert not RS.supports(columns)  # of a weight that is stored (in, out)
    monkeypatch.setattr(table, "KERNELS", [k for k in table.kernels() if k is not RS])
    packed = stack_of((4, 128, 320), "nf4", True)
    for by_rows in (True, False):
        asked = Matmul(packed, torch.bfloat16, 4 * each, by_rows, reused=reused)
        with cards.acting_as(HOPPER_CARD):
            matmul = table.choose(asked)
        assert (matmul.kernel is HOPPER) == taken
        assert not taken or matmul.tile == limits.WIDE_TILE
        with cards.acting_as(cards.PORTABLE):
            assert table.choose(asked).kernel is not HOPPER


@pytest.mark.parametrize(
    ("capability", "dtype", "wanted"),
    [
        ((8, 0), torch.bfloat16, grouped_mm.KERNEL),
        (cards.HOPPER, torch.bfloat16, grouped_mm.BY_TORCH),
        (cards.HOPPER, torch.float16, grouped_mm.KERNEL),
        ((10, 0), torch.bfloat16, grouped_mm.BY_TORCH),
        ((10, 0), torch.float16, grouped_mm.KERNEL),
        ((12, 0), torch.bfloat16, grouped_mm.KERNEL),
    ],
)
def test_who_multiplies_many_rows(monkeypatch, capability, dtype, wanted):
    card = cards.of_capability(capability)
    monkeypatch.setattr(cards, "actual", lambda device: card)
    packed = SimpleNamespace(spec=WeightSpec((2, 192, 512), "nf4", 64, 0, 0), experts=2)
    matmul = Matmul(packed, dtype, 1 << 20, by_rows=False, backward=True, held=True)
    assert table.choose(matmul).kernel is wanted
