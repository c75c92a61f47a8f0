"""Which matmuls the kernel for few rows takes, and who takes over where it does not compile."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
from fused_layer import close, stack_of  # noqa: E402

from moe_qlora.kernels import (  # noqa: E402
    limits,
    quantized_mm,
    quantized_mm_skinny,
    table,
)
from moe_qlora.kernels import routing as routing_  # noqa: E402
from moe_qlora.kernels.expert_mm import Problem  # noqa: E402
from moe_qlora.kernels.factors import Factors  # noqa: E402
from moe_qlora.kernels.weights import WeightSpec  # noqa: E402
from moe_qlora.packing import codec  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

SKINNY = quantized_mm_skinny.KERNEL
KEY = SKINNY.name, "nf4", -1


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
    for works in (False, True):
        monkeypatch.setattr(table, "validated", {KEY: works})
        matmul = table.choose(packed, 4 * each, dtype, by_rows=by_rows)
        assert (matmul.kernel is SKINNY) == (taken and works)
        assert not taken or matmul.tile == limits.FEW_TILE
        assert not taken or routing.table(matmul.tile) is routing.tiles
        assert not matmul.kernel.gathers and matmul.kernel.order is None


def test_other_dtypes_are_not_taken():
    spec = stack_of((4, 128, 512), "nf4", True).spec
    assert SKINNY.supports(Problem(spec, torch.bfloat16, 4, True))
    assert not SKINNY.supports(Problem(spec, torch.float32, 4, True))
    wide = WeightSpec((4, 128, 512), "mxfp4", 32, 1, -1)
    assert not SKINNY.supports(Problem(wide, torch.bfloat16, 4, True))


def test_what_does_not_compile_goes_to_the_portable_kernel(monkeypatch):
    known = {KEY: True}
    for module in (table, quantized_mm):
        monkeypatch.setattr(module, "validated", known)
    monkeypatch.setattr(quantized_mm_skinny, "_launch", refused)
    packed = stack_of((3, 72, 512), "nf4", True)
    routing = routing_.route(torch.randint(4, (12, 2)), 3)  # of which 3 is held elsewhere
    x, factor = torch.randn(24, 512 + 16), torch.randn(3, 72, 16)
    matmul = table.choose(packed, 24, torch.bfloat16, by_rows=True)
    assert matmul.kernel is SKINNY
    matmul = matmul._replace(factors=Factors(torch.empty(3, 16, 512), factor, 1.0))
    with pytest.warns(UserWarning, match="kernel for few rows does not compile"):
        y = table.multiply(x, matmul, routing)
    weight, offsets = codec.unpack(packed), routing.expert_offsets.tolist()
    for e in range(3):
        rows = slice(offsets[e], offsets[e + 1])
        close(y[rows], x[rows] @ torch.cat([weight[e], factor[e]], 1).t())
    assert table.choose(packed, 24, torch.bfloat16, by_rows=True).kernel is quantized_mm.KERNEL


def refused(*_):
    raise RuntimeError("refused")
