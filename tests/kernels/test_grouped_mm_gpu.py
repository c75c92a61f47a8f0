"""On a CUDA device: the own grouped matmul, and layers as on a card without torch's."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from moe_qlora.kernels import cards, grouped_mm, moe_layer, table, workspace
from moe_qlora.kernels.gate_kernels import Gate
from moe_qlora.kernels.routing import route
from tests.helpers.fused_layer import stack_of, tiled

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]


def problem(inner, out, dtype, by_rows, sizes, apart=16):
    """Rows further apart than wide, matrices as views, offsets, and the product in fp64."""
    experts = len(sizes)
    shape = (experts, out, inner + apart) if by_rows else (experts, inner, out + apart)
    room = torch.randn(shape, device="cuda").mul_(0.1).to(dtype)
    matrices = room[:, :, :inner].transpose(1, 2) if by_rows else room[:, :, :out]
    x = torch.randn(sum(sizes) + 5, inner + 2 * apart, device="cuda").to(dtype)[:, :inner]
    offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
    spans = enumerate(pairwise(offsets.tolist()))
    right = torch.cat([x[a:b].double() @ matrices[e].double() for e, (a, b) in spans])
    return x, matrices, offsets, right


def assert_exact(found, right, dtype):
    error = (found.double() - right).norm() / right.norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4), float(error)


def multiply(x, matrices, offsets, tile, cut):
    matmul, rows = SimpleNamespace(tile=tile, cut=cut), tiled(offsets, len(x), tile)
    return grouped_mm.KERNEL.launch(x, matmul, matrices, rows, (0, matrices.shape[2]))


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("inner", "out", "sizes"),
    [
        (2064, 1536, [300, 0, 1, 129, 64]),
        (784, 264, [0, 200, 33, 0]),
        (40, 72, [1]),
        (8, 8, [0, 70, 3]),
    ],
)
def test_every_cut(by_rows, dtype, tile, inner, out, sizes):
    torch.manual_seed(inner + tile)
    x, matrices, offsets, right = problem(inner, out, dtype, by_rows, sizes)
    cuts = {grouped_mm.default(tile, x.device)}
    for card in (cards.PORTABLE, cards.Card("nvidia", (8, 0), 163 << 10)):
        with cards.acting_as(card):
            cuts.add(grouped_mm.default(tile, x.device))
    for cut in sorted(cuts):
        found = [multiply(x, matrices, offsets, tile, cut)[: len(right)] for _ in range(4)]
        assert_exact(found[0], right, dtype)
        assert all(torch.equal(found[0], again) for again in found), cut


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "inner", "rank", "out"),
    [(3, 40, 8, 72), (700, 320, 0, 264), (700, 2048, 16, 768), (900, 1000, 128, 1544)],
)
def test_rows_fetched_from_tokens(by_rows, dtype, tokens, inner, rank, out):
    """As rows that are copied, with their products behind, in fp64; alike each time."""
    torch.manual_seed(tokens)
    experts, top_k = 4, 3
    index = torch.rand(tokens, experts, device="cuda").topk(top_k, -1).indices
    routing = route(index, experts)
    x = torch.randn(tokens, inner, device="cuda").to(dtype)
    products = torch.randn(tokens * top_k, rank, device="cuda").to(dtype)
    shape = (experts, out, inner + rank) if by_rows else (experts, inner + rank, out)
    matrices = torch.randn(shape, device="cuda").mul_(0.1).to(dtype)
    matrices = matrices.transpose(1, 2) if by_rows else matrices
    tokens_of_rows = routing.order[: routing.count].long() // top_k
    read = torch.cat([x[tokens_of_rows], products], 1).double()
    for tile in {routing.tile, 128} if routing.counts[1] else {routing.tile}:
        matmul = SimpleNamespace(tile=tile, cut=grouped_mm.default(tile, x.device))
        arguments = x, matmul, matrices, routing, (0, out), products.flatten()
        y, again = (grouped_mm.KERNEL.launch(*arguments) for _ in range(2))
        ends = routing.expert_offsets[: experts + 1].tolist()
        spans = enumerate(pairwise(ends))
        right = torch.cat([read[a:b] @ matrices[e].double() for e, (a, b) in spans])
        assert_exact(y, right, dtype)
        assert torch.equal(y, again)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("int8", False)])
@pytest.mark.parametrize("tokens", [1, 90, 400, 1400])
@pytest.mark.parametrize(("hidden", "inner"), [(320, 192), (512, 512)])
@pytest.mark.parametrize("transposed", [False, True])
def test_layers_as_on_other_cards(
    dtype, kind, double, tokens, hidden, inner, transposed, monkeypatch
):
    """Forward and backward of both ways, on codes and dequantized, beside the usual way.

    On Hopper that has reordered columns, forward, where weights are stored (out, in) in whole
    groups of 256.
    """
    torch.manual_seed(tokens)
    experts, rank, top_k = 4, 8, 2

    def packed(out, into):
        shape = (experts, into, out) if transposed else (experts, out, into)
        return stack_of(shape, kind, double, dtype, 0.05).to("cuda")

    def lora(out, into):
        a = torch.randn(experts * rank, into, device="cuda").mul_(0.05).to(dtype)
        return moe_layer.Lora(a, torch.randn(out, rank * experts, device="cuda").to(dtype), 0.1)

    stacks = packed(2 * inner, hidden), packed(hidden, inner)
    layer = moe_layer.Layer(*stacks, transposed, Gate("silu"), dtype)
    x, grad = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(2))
    weights = torch.rand(tokens, top_k, device="cuda").to(dtype)
    index = torch.rand(tokens, experts - 1, device="cuda").topk(top_k, -1).indices
    loras = lora(2 * inner, hidden), lora(hidden, inner)
    operands = moe_layer.Operands(x, weights, (None, None), loras)

    def run():
        workspace.release_workspace()
        state = moe_layer.gate_up_forward(layer, index, operands)
        out = moe_layer.down_forward(layer, state)
        return [out, *moe_layer.backward(layer, state.routing, state.saved, grad, operands)]

    def forbidden(*args, **kwargs):
        raise AssertionError("torch's grouped matmul")

    usual = run()
    for few in (True, False):
        with monkeypatch.context() as patch, cards.acting_as(cards.PORTABLE):
            if not few:
                patch.setattr(table, "KERNELS", [k for k in table.kernels() if not k.on_codes])
            patch.setattr(torch.nn.functional, "grouped_mm", forbidden)
            run()  # what is found out once, such as whether int8 is multiplied rightly, may wait
            try:
                torch.cuda.set_sync_debug_mode("error")
                own = run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for mine, other in zip(own, usual, strict=True):
            assert (mine.double() - other.double()).norm() <= 0.015 * other.double().norm()
