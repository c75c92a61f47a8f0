"""Which matmuls the kernel for few rows takes, and who takes over where it does not compile."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import close, stack_of  # noqa: E402

from moe_qlora.kernels import (  # noqa: E402
    autotune,
    cards,
    expert_mm,
    limits,
    quantized_check,
    quantized_config,
    quantized_mm,
    quantized_mm_few,
)
from moe_qlora.kernels import routing as routing_  # noqa: E402
from moe_qlora.kernels.weights import WeightSpec  # noqa: E402
from moe_qlora.packing import codec  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

FEW = quantized_config.FEW
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "kind", "each", "by_rows", "taken"),
    [
        (512, "nf4", 1, True, True),
        (768, "fp4", 10, True, True),
        (512, "nf4", 11, True, False),  # in tiles of 32 rows
        (512, "nf4", 90, True, False),
        (512, "nf4", 1, False, False),  # sums over stored rows
        (256, "nf4", 1, True, False),
        (320, "nf4", 1, True, False),
        (512, "int8", 1, True, False),
    ],
)
def test_which_matmuls_the_kernel_for_few_rows_takes(
    monkeypatch, dtype, columns, kind, each, by_rows, taken
):
    packed = stack_of((4, 128, columns), kind, kind != "int8")
    routing = routing_.route(torch.arange(4 * each)[:, None] % 4, 4)
    matmul = expert_mm.ExpertMatmul(packed, None, by_rows, False, True, dtype)
    for works in (False, True):
        monkeypatch.setattr(quantized_mm, "works", {(FEW.own, -1): works})
        config, tiles, tile = expert_mm.quantized_cut(matmul, routing, False)
        assert (config == FEW) == (taken and works)
        assert not taken or (tile == limits.FEW_TILE and tiles is routing.tiles)
        assert not expert_mm.gathers(matmul, routing, False)
        assert not expert_mm.reorders(matmul, routing)


def test_other_dtypes_are_not_taken(monkeypatch):
    monkeypatch.setattr(quantized_mm, "works", {(FEW.own, -1): True})
    spec = stack_of((4, 128, 512), "nf4", True).spec
    assert not quantized_check.multiplies_few(spec, torch.float32, 16, back=False)
    assert not quantized_check.multiplies_few(spec, torch.bfloat16, 32, back=False)
    wide = WeightSpec((4, 128, 512), "mxfp4", 32, 1, -1)
    assert not quantized_check.multiplies_few(wide, torch.bfloat16, 16, back=False)


@pytest.mark.parametrize(
    ("card", "asked"),
    [
        (cards.Card("nvidia", (8, 0), 163 << 10), {FEW}),
        (cards.PORTABLE, {FEW}),
        (cards.Card("nvidia", cards.HOPPER, 227 << 10),
         {FEW, quantized_config.HOPPER, quantized_config.REGISTERS}),
        (cards.Card("amd", (0, 0), 64 << 10), set()),
        (cards.Card("", (0, 0), 99 << 10), set()),
    ],
)  # fmt: skip
def test_each_card_tries_the_kernels_that_it_may_have(monkeypatch, card, asked):
    monkeypatch.setattr(quantized_mm, "works", {})
    tried = set()
    monkeypatch.setattr(cards, "actual", lambda device: card)
    monkeypatch.setattr(
        quantized_check, "_is_right", lambda device, kind, tile, config: tried.add(config) or True
    )
    quantized_check.prepare(torch.device("cuda", 0))
    assert tried == asked
    right = {own for (own, _), works in quantized_mm.works.items() if works}
    assert right == {config.own for config in asked}


def test_what_does_not_compile_goes_to_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(quantized_mm, "works", {(FEW.own, -1): True})
    monkeypatch.setattr(quantized_mm_few, "step", lambda *_: refused)
    packed = stack_of((3, 72, 512), "nf4", True)
    routing = routing_.route(torch.randint(4, (20, 2)), 3)  # of which 3 is held elsewhere
    x, factor = torch.randn(40, 512 + 16), torch.randn(3, 72, 16)
    with pytest.warns(UserWarning, match="kernel for few rows does not compile"):
        y = quantized_mm.launch(
            x, packed, factor, None, routing.expert_offsets, routing.tiles, 16, FEW,
            back=False, span=(0, 72),
        )  # fmt: skip
    weight, offsets = codec.unpack(packed), routing.expert_offsets.tolist()
    for e in range(3):
        rows = slice(offsets[e], offsets[e + 1])
        close(y[rows], x[rows] @ torch.cat([weight[e], factor[e]], 1).t())
    assert not quantized_check.multiplies_few(packed.spec, torch.bfloat16, 16, back=False)


def refused(*_):
    raise RuntimeError("refused")


def test_a_tuned_table_may_name_the_kernel_for_few_rows(monkeypatch):
    """Where it works; elsewhere the default serves."""
    assert FEW in autotune._CANDIDATES
    packed = stack_of((2, 64, 512), "nf4", True)
    default = quantized_config.default(16, CPU, back=False)
    for works, config, may in [(True, FEW, True), (False, FEW, False), (True, default, True)]:
        monkeypatch.setattr(quantized_mm, "works", {(FEW.own, -1): works})
        own = autotune._own(packed, torch.bfloat16, 16, False)
        assert autotune._may_run(config, packed, 16, own) == may


def test_tuning_measures_the_kernel_for_few_rows(monkeypatch):
    """Its step of 256 columns is several blocks, which no portable kernel could take."""
    monkeypatch.setattr(autotune, "_elapsed", lambda run, is_right: 1.0)
    packed = stack_of((2, 64, 512), "nf4", True)
    rows = torch.empty(4, 512, dtype=torch.bfloat16)
    problem = rows, *(torch.empty(4, dtype=torch.int32) for _ in range(2)), packed.absmax
    for works, tile, back, config, measured in [
        (True, 16, False, FEW, True),
        (False, 16, False, FEW, False),
        (True, 32, False, FEW, False),
        (True, 16, True, FEW, False),
        (True, 16, False, FEW._replace(own=""), False),
    ]:
        monkeypatch.setattr(quantized_mm, "works", {(FEW.own, -1): works})
        found = autotune._try(problem, packed, tile, back, config)
        assert found == (1.0 if measured else None)


@pytest.mark.parametrize("blocksize", [32, 64])
def test_what_is_given_up_is_that_kernel_alone(monkeypatch, blocksize):
    """Hopper's kernel that does not take blocks of 32 still takes those of 64."""
    hopper, registers = quantized_config.HOPPER, quantized_config.REGISTERS
    spec = WeightSpec((2, 64, 512), "nf4", blocksize, 0, -1)
    kernels = (FEW.own, registers.own, hopper.own, "mxfp4")
    for config in (FEW, registers, hopper):
        monkeypatch.setattr(quantized_mm, "works", {(kernel, -1): True for kernel in kernels})
        with pytest.warns(UserWarning, match="does not compile"):
            quantized_mm._give_up(config, spec, RuntimeError())
        lost = {kernel for (kernel, _), works in quantized_mm.works.items() if not works}
        assert lost == {"mxfp4" if config == hopper and blocksize == 32 else config.own}
