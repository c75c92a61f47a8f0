"""The own grouped matmul in Triton's interpreter, in fp32 and fp16, against a loop over experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from moe_qlora.kernels import grouped_mm  # noqa: E402
from moe_qlora.kernels.grouped_mm import Cut  # noqa: E402
from tests.helpers.tiles import tiled  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = Cut(32, 32, 2, 4, 3)
CUTS = [SMALL, Cut(64, 16, 3, 4, 1), Cut(16, 64, 2, 8, 8)]


def in_a_loop(x, matrices, offsets):
    """Expert by expert; NaN in the rows of no expert."""
    out = torch.full((len(x), matrices.shape[2]), torch.nan, dtype=torch.float64)
    for e in range(len(matrices)):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        out[rows] = x[rows].double() @ matrices[e].double()
    return out


def operands(inner, out, *, experts=4, by_rows=True, apart=0, dtype=torch.float32):
    """`(E, inner, out)`, a view that has `apart` NaN behind each row, or column by column."""
    shape = (experts, out, inner + apart) if by_rows else (experts, inner, out + apart)
    room = torch.full(shape, torch.nan, dtype=dtype)
    view = room[:, :, :inner].transpose(1, 2) if by_rows else room[:, :, :out]
    view.copy_(torch.randn(experts, inner, out) * 0.2)
    return view


def rows_of(count, inner, *, apart=0, dtype=torch.float32):
    """`(count, inner)`, with `apart` NaN behind each row."""
    room = torch.full((count, inner + apart), torch.nan, dtype=dtype)
    room[:, :inner] = torch.randn(count, inner)
    return room[:, :inner]


def check(x, matrices, sizes, cut, tile, tolerance):
    """`sizes` are each expert's rows; those of x beyond their sum belong to none."""
    offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    matmul, rows = SimpleNamespace(tile=tile, cut=cut), tiled(offsets, len(x), tile)
    y = grouped_mm.KERNEL.launch(x, matmul, matrices, rows, (0, matrices.shape[2]))
    expected = in_a_loop(x, matrices, offsets)
    live = int(offsets[-1])
    assert y.shape == expected.shape and y.dtype == x.dtype
    error = (y[:live].double() - expected[:live]).norm() / expected[:live].norm()
    assert error < tolerance, float(error)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(
    ("inner", "out", "sizes"),
    [
        (40, 24, [1, 0, 0, 0]),  # one row, three experts without
        (64, 64, [16, 32, 0, 5]),  # whole steps and features
        (72, 136, [0, 7, 40, 0]),
        (8, 8, [3, 0, 17, 2]),
    ],
)
def test_equals_a_loop_over_experts(cut, by_rows, inner, out, sizes):
    torch.manual_seed(inner)
    matrices = operands(inner, out, by_rows=by_rows, apart=8)
    check(rows_of(sum(sizes) + 3, inner, apart=24), matrices, sizes, cut, 16, 1e-6)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_half_precision_in_every_tile(tile):
    torch.manual_seed(tile)
    x, matrices = (
        rows_of(150, 48, dtype=torch.float16),
        operands(48, 40, by_rows=False, dtype=torch.float16),
    )
    check(x, matrices, [130, 0, 1, 19], SMALL, tile, 3e-4)
