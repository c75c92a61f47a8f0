"""Rows as Hopper's own kernels take them: fetched from tokens, and with columns reordered."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import Case, check_layer, stack_of  # noqa: E402

from moe_qlora.kernels import (  # noqa: E402
    cards,
    grouped_mm,
    limits,
    quantized_mm,
    quantized_mm_hopper,
    quantized_mm_rs,
    table,
)
from moe_qlora.kernels.gate_kernels import Gate  # noqa: E402
from moe_qlora.kernels.table import Matmul  # noqa: E402
from moe_qlora.kernels.weights import WeightSpec  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

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
