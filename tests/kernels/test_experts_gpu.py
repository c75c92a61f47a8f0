"""On a CUDA device: the grouped backend, whole models, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.experts import projection
from moe_qlora.experts.backend import runs_grouped
from moe_qlora.experts.fused import register_operators
from moe_qlora.packing import codec
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings
from tests.unit.experts import test_forward as tests

pytestmark = pytest.mark.gpu

IN, OUT, E, K = 256, 320, 7, 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("tokens", [1, 77, 1000])
def test_grouped_products_equal_fp64(transposed, tokens, dtype):
    """Of packed codes, and of LoRA's factors with all their gradients, beside loops in fp64."""
    torch.manual_seed(tokens)
    register_operators()
    index = torch.stack([torch.randperm(E, device="cuda")[:K] for _ in range(tokens)])
    ids = index.reshape(-1).sort().values
    offsets = torch.searchsorted(ids, torch.arange(E + 1, device="cuda")).int()
    stack = torch.randn(E, *((IN, OUT) if transposed else (OUT, IN)), device="cuda") / 16
    packed = pack(stack.to(dtype), CodecSettings("nf4"))
    x, grad = (torch.randn(tokens * K, n, device="cuda").to(dtype) for n in (IN, OUT))
    a, b = torch.randn(E * 9, IN, device="cuda") / 16, torch.randn(OUT, 9 * E, device="cuda")
    exact = codec.unpack(packed).double()

    def run(dtype, product):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, a, b)]
        left, right = leaves[1].view(E, 9, IN).mT, leaves[2].view(OUT, 9, E).permute(2, 1, 0)
        y = product(leaves[0])
        y = y + projection._product(projection._product(leaves[0], left, offsets), right, offsets)
        y.backward(grad.to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def by_codes(x):
        assert runs_grouped(packed.shape, x, dtype)
        return projection._packed_product(packed, x, offsets, transposed, False)

    def plain(x):
        return projection._product(
            x, exact.to(x.dtype) if transposed else exact.to(x.dtype).mT, offsets
        )

    right = run(torch.float64, plain)
    first, second = run(dtype, by_codes), run(dtype, by_codes)
    for wanted, mine in zip(right, first, strict=True):
        assert (mine.double() - wanted).norm() <= 0.01 * wanted.norm()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_a_trained_bias_sums_thousands_of_rows_in_float32():
    """Each row adds 0 to 1: a sum of some hundreds in bf16 no longer changes by that."""
    style = tests.STYLES["interleaved"]
    module = tests.pack(tests.make(style, torch.bfloat16), style).to("cuda")
    x, index, weights = (t.detach().cuda() for t in tests.routing(torch.bfloat16, tokens=8192))
    module(x, index, weights).sum().backward()
    wanted = torch.zeros(tests.E, dtype=torch.float64, device="cuda")
    wanted.index_add_(0, index.flatten(), weights.flatten().double())
    grad = module.down_proj_bias.grad.double()
    assert ((grad - wanted[:, None]).abs() <= 0.01 * wanted[:, None]).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait_for_the_device(monkeypatch):
    style = tests.STYLES["concatenated"]
    monkeypatch.setattr(tests, "H", 64)
    monkeypatch.setattr(tests, "I", 32)
    module = tests.pack(tests.make(style, torch.bfloat16), style).to("cuda")
    x, index, weights = (t.detach().to("cuda") for t in tests.routing(torch.bfloat16))
    x.requires_grad_()
    module(x, index, weights).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x, index, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
