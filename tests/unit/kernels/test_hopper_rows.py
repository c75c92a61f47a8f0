"""Rows as Hopper's own kernels take them: fetched from tokens, and with columns reordered."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import CASES, SILU, Case, check_layer, close, stack_of  # noqa: E402

from moe_qlora.kernels import (  # noqa: E402
    cards,
    expert_mm,
    limits,
    moe_layer,
    quantized_check,
    quantized_config,
    quantized_mm,
    quantized_mm_registers,
    workspace,
)
from moe_qlora.kernels import routing as routing_  # noqa: E402
from moe_qlora.kernels.row_launches import Gate  # noqa: E402
from moe_qlora.kernels.weights import WeightSpec  # noqa: E402
from moe_qlora.packing import codec  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

ANOTHER = quantized_mm.Config(64, 128, 2, 4, False)
"""A kernel that the interpreter runs, in the place of Hopper's."""


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
            x, config = quantized_mm_registers.restore(x, columns), ANOTHER
            restored.append(columns)
        return real(x, packed, factor, absmax, offsets, tiles, tile, config, **options)

    monkeypatch.setattr(quantized_mm, "launch", launch)
    monkeypatch.setattr(quantized_check, "in_registers", lambda *_, back: not back)
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
    monkeypatch.setattr(quantized_mm, "works", {(quantized_config.REGISTERS.own, -1): True})
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
    monkeypatch.setattr(quantized_mm, "works", {})
    spec = WeightSpec((2, 192, 512), "nf4", 64, 0, 0)

    def falls_back(device, kind, tile, config):
        quantized_mm._give_up(config, spec, RuntimeError())
        return True

    monkeypatch.setattr(quantized_check, "_is_right", falls_back)
    with pytest.warns(UserWarning, match="does not compile"):
        quantized_check.prepare(torch.device("cuda", 0))
    assert not quantized_check.on_hopper(spec, torch.bfloat16, back=False)
    assert not quantized_check.in_registers(spec, torch.bfloat16, back=False)
    assert not quantized_check.multiplies_few(spec, torch.bfloat16, 16, back=False)


@pytest.mark.parametrize("gathers", [False, True])
def test_what_does_not_compile_is_multiplied_in_order(gathers, monkeypatch):
    """The portable kernel takes over a product whose rows are in the order of registers."""
    monkeypatch.setattr(quantized_mm, "works", {(quantized_config.REGISTERS.own, -1): True})
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
    assert not quantized_mm.works[quantized_config.REGISTERS.own, -1]


def refused(*_):
    raise RuntimeError("refused")
