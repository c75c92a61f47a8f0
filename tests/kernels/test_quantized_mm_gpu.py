"""On a CUDA device: products on codes, each configuration and the kernel for Hopper."""

import pytest
import torch

pytest.importorskip("triton")
from fused_layer import stack_of, tiled

from moe_qlora.kernels import (
    cards,
    grouped_mm,
    quantized_mm,
    quantized_mm_hopper,
    quantized_mm_rs,
    table,
)
from moe_qlora.kernels.factors import Factors
from moe_qlora.kernels.routing import route
from moe_qlora.kernels.table import Matmul

pytestmark = pytest.mark.gpu


def problem(shape, back, kind="nf4", double=True, dtype=torch.bfloat16, each=90, rank=16):
    torch.manual_seed(sum(shape))
    packed = stack_of(shape, kind, double, dtype).to("cuda")
    experts, n, k = shape
    inner, outer = (n, k) if back else (k, n)
    index = torch.randint(experts - 1, (experts * each, 1), device="cuda")  # the last has no rows
    routing = route(index, experts)
    x = torch.randn(len(index), inner + rank, device="cuda", dtype=dtype)
    factor = torch.randn(experts, outer, rank, device="cuda", dtype=dtype)
    decoded = torch.empty(shape, device="cuda", dtype=dtype)
    grouped_mm.decode(packed, decoded)
    right = torch.empty(len(index), outer, device="cuda", dtype=torch.float64)
    offsets = routing.expert_offsets[: experts + 1].tolist()
    for e in range(experts):
        rows = x[offsets[e] : offsets[e + 1]].double()
        w = decoded[e].double() if back else decoded[e].double().t()
        right[offsets[e] : offsets[e + 1]] = (
            rows[:, :inner] @ w + rows[:, inner:] @ factor[e].double().t()
        )
    return packed, routing, x, factor, right


def run(kernel, packed, routing, x, factor, tile, back, span, cut=None, products=None):
    """A product by this kernel, whatever the table says, in tiles of so many rows."""
    offsets = routing.expert_offsets[: packed.experts + 1]
    rows = tiled(offsets, routing.count, tile, routing.order, routing.top_k)
    factors = None
    if factor is not None:
        factors = Factors(factor[..., :0].transpose(1, 2), factor, 1.0)
    matmul = Matmul(
        packed, x.dtype, routing.count, not back, factors=factors, kernel=kernel, tile=tile, cut=cut
    )
    operand = kernel.prepare(matmul, rows, span, "first")
    return kernel.launch(x, matmul, operand, rows, span, products)


def assert_exact(found, right, dtype):
    """One rounding of the result: all else is in fp32 or exact; and the same bits each time."""
    limit = 2.0e-3 if dtype == torch.bfloat16 else 2.5e-4
    assert (found[0].double() - right).norm() < limit * right.norm()
    assert all(torch.equal(found[0], again) for again in found)


def takes(kernel, packed, dtype, back, rows=1000):
    """Whether a kernel works here and takes such a product of `rows` rows."""
    on_hopper = torch.cuda.get_device_capability() == cards.HOPPER
    matmul = Matmul(packed, dtype, rows, not back)
    return kernel.supports(matmul) and (on_hopper or not kernel.hopper)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(((4, 192, 320), kind) for kind in (("nf4", True), ("int8", False))),
        # Whole blocks of 32 and not of 64, whose last step is half empty, and gpt-oss's own sizes
        *((shape, ("mxfp4", False)) for shape in ((4, 200, 96), (4, 320, 2880), (4, 2880, 320))),
    ],
)
def test_the_cuts_of_all_cards(shape, kind, tile, back):
    packed, routing, x, factor, right = problem(shape, back, *kind)
    of, kernel = Matmul(packed, x.dtype, len(x), not back), quantized_mm.KERNEL
    cuts = {kernel.cut(of, tile)}
    with cards.acting_as(cards.PORTABLE):
        cuts.add(kernel.cut(of, tile))
    for config in cuts:
        for span in ((0, right.shape[1]), (64, min(128, right.shape[1]))):
            given = packed, routing, x, factor, tile, back, span, config
            y, wanted = run(kernel, *given), right[:, slice(*span)]
            assert (y.double() - wanted).norm() < 3e-3 * wanted.norm(), (config, span)
            assert torch.equal(y, run(kernel, *given))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", [("nf4", True), ("nf4", False), ("fp4", True), ("mxfp4", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("each", [90, 170])
@pytest.mark.parametrize("span", [(0, None), (64, 128)])
def test_hopper_is_as_exact_as_decoding(back, kind, dtype, rank, tile, each, span):
    packed, routing, x, factor, right = problem(
        (4, 192, 320), back, *kind, dtype, each=each, rank=rank
    )
    if not takes(quantized_mm_hopper.KERNEL, packed, dtype, back):
        pytest.skip("no Hopper GPU")
    span = span[0], span[1] or right.shape[1]
    factor = factor if rank else None
    given = quantized_mm_hopper.KERNEL, packed, routing, x, factor, tile, back, span
    found = [run(*given) for _ in range(6)]
    assert_exact(found, right[:, slice(*span)], dtype)


@pytest.mark.parametrize("kind", [("nf4", True), ("nf4", False), ("fp4", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("each", [90, 170, 300])  # rows in tiles of 64, 128 and 256
@pytest.mark.parametrize("span", [(0, None), (64, 128)])
@pytest.mark.parametrize("gathers", [False, True])
def test_registers_are_as_exact_as_decoding(kind, dtype, rank, each, span, gathers):
    inner = 512 if rank else 1280
    packed, routing, x, factor, right = problem(
        (4, 192, inner), False, *kind, dtype, each=each, rank=rank
    )
    if not takes(quantized_mm_rs.KERNEL, packed, dtype, False):
        pytest.skip("no Hopper GPU")
    span, products = (span[0], span[1] or right.shape[1]), None
    rows, tail = x[:, :inner].contiguous(), x[:, inner:].contiguous()
    if gathers:
        tokens = torch.empty_like(rows)
        tokens[routing.order[: len(rows)].long()] = rows
        x, products = quantized_mm_rs.reorder(tokens), tail
    else:
        x = torch.cat([quantized_mm_rs.reorder(rows), tail], 1)
    factor = factor if rank else None
    given = packed, routing, x, factor, 256, False, span, None, products
    found = [run(quantized_mm_rs.KERNEL, *given) for _ in range(5)]
    assert takes(quantized_mm_rs.KERNEL, packed, dtype, False)  # it has compiled
    assert_exact(found, right[:, slice(*span)], dtype)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("inner", [64, 128])
def test_the_fewest_steps(inner, back):
    """A single step is no loop for Hopper's kernel: the portable one takes it."""
    shape = (4, inner, 192) if back else (4, 192, inner)
    packed, routing, x, factor, right = problem(shape, back)
    matmul = table.choose(Matmul(packed, x.dtype, len(x), not back))
    assert inner > 64 or matmul.kernel is not quantized_mm_hopper.KERNEL
    whole = 0, right.shape[1]
    y = run(matmul.kernel, packed, routing, x, factor, matmul.tile, back, whole, matmul.cut)
    assert (y.double() - right).norm() < 3e-3 * right.norm()
