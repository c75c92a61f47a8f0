"""On a CUDA device: the whole-layer kernels and grouped products, to a module's gradients."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from moe_qlora.experts import backend, fused, operands, projection
from moe_qlora.experts.backend import plain_gate, runs_grouped
from moe_qlora.experts.fused import register_operators
from moe_qlora.kernels import grouped_mm, workspace
from moe_qlora.packing import codec
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings
from tests.helpers.fused_layer import stack_of
from tests.helpers.lora_layer import layer_gradients, random_like
from tests.unit.experts import test_forward

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def scratch():
    workspace.release_workspace()
    yield workspace
    workspace.release_workspace()
    workspace.set_workspace_cap(None)


@pytest.fixture
def tests(monkeypatch):
    """The unit tests' styles of experts modules, at sizes that suit the kernels."""
    for name, size in {"H": 192, "I": 128, "E": 6, "T": 37}.items():
        monkeypatch.setattr(test_forward, name, size)
    return test_forward


@pytest.mark.parametrize(
    ("kind", "double"),
    [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False), ("int8", False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_decode_equals_bitsandbytes(kind, double, dtype):
    for shape in [(5, 24, 40), (4, 64, 128), (3, 200, 1400), (2, 1, 8)]:
        stack = stack_of(shape, kind, double, dtype).to("cuda")
        out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        grouped_mm.decode(stack, out)
        assert torch.equal(out, codec.unpack(stack))


def test_decodes_beyond_int32():
    weight = torch.empty(33, 8192, 8192, device="cuda", dtype=torch.bfloat16).normal_()
    stack = codec.pack(weight, CodecSettings("nf4", True))
    del weight
    out = torch.full((33, 8192, 8192), float("nan"), device="cuda", dtype=torch.bfloat16)
    grouped_mm.decode(stack, out)
    for e in (0, 31, 32):
        assert torch.equal(out[e : e + 1], codec.unpack_range(stack, e, e + 1))


def layer_of(tests, style, ranks, dtype=torch.bfloat16, lora=None, kind="nf4", **routing):
    """A frozen module on the device, its LoRA, and x, index, weights."""
    style = tests.STYLES[style]
    module = tests.make(style, dtype)
    del module.alpha  # numbers, as in transformers' own classes
    module.alpha, module.limit = 1.3, 0.4
    module = tests.pack(module, style, kind=kind).to("cuda").requires_grad_(False)
    provider = tests.Provider(style, ranks=ranks).to("cuda", lora or dtype)
    operands.set_lora_source(module, provider)
    x, index, weights = (t.detach().cuda() for t in tests.routing(dtype, **routing))
    return module, provider, (x.requires_grad_(), index, weights.requires_grad_())


def both_ways(module, provider, parts, monkeypatch):
    """Outputs and gradients of the kernels, and of the projections one by one."""
    assert choice(module, parts[0]) == backend.FUSED
    fused = layer_gradients(module, provider, parts)
    real = backend.kernels_run
    monkeypatch.setattr(backend, "kernels_run", lambda device: False)
    plain = layer_gradients(module, provider, parts)
    monkeypatch.setattr(backend, "kernels_run", real)
    return fused, plain


def choice(module, x):
    return backend.choose_backend(module, backend.read_call(module, x))


def in_fp64(tests, style, module, provider, parts, limit=0.4):
    """The unit tests' plain loops in fp64 on the CPU, over the same decoded weights."""
    wide = tests.make(style, torch.float64)
    if style.clamped:
        wide._apply_gate = lambda pre: plain_gate(pre, "silu", True, True, limit, 1.3, 1.0)
    for name in tests.names(style):
        setattr(wide, name, torch.nn.Parameter(getattr(module, name).detach().double().cpu()))
        if style.bias:
            bias = getattr(module, f"{name}_bias").detach().double().cpu()
            setattr(wide, f"{name}_bias", torch.nn.Parameter(bias))
    x, index, weights = (t.detach().cpu() for t in parts)
    x, weights = (t.double().requires_grad_() for t in (x, weights))
    twin = provider.to("cpu", torch.float64)
    run, seed = partial(tests.slow, wide, style, twin), random_like(parts[0]).double().cpu()
    return layer_gradients(run, twin, (x, index, weights), seed)


ROUTINGS = {
    "usual": {},
    "one token": {"tokens": 1},
    "many": {"tokens": 700},
    "thousands": {"tokens": 3000},
    "empty experts": {"empty": (0, 4)},
}


@pytest.mark.parametrize(
    "style",
    [
        *("concatenated", "transposed", "biased", "interleaved"),
        *("non-gated", "non-gated-transposed-biased"),
    ],
)
@pytest.mark.parametrize("case", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("ranks", [((16,), (16,)), ((3,), (128,)), ((), (1,)), ((4,), (2,))])
def test_module_is_as_exact_as_its_projections(tests, style, case, ranks, monkeypatch):
    dtype = torch.bfloat16
    module, provider, parts = layer_of(tests, style, ranks, dtype, **case)
    style = tests.STYLES[style]
    fused, plain = both_ways(module, provider, parts, monkeypatch)
    exact = in_fp64(tests, style, module, provider, parts)
    # A rounding beside a clamp's edge switches an element's gradient: as much as moving the edges
    # by a rounding does, of sums of up to 5. (On the CPU, one weight in 30 rounded otherwise makes
    # errors of 18 % out of 4 %.)
    edges = [0.0] * len(exact)
    if style.clamped:
        moved = [
            in_fp64(tests, style, module, provider, parts, limit=0.4 + side / 100)
            for side in (-1, 1)
        ]
        edges = [float((a - b).norm()) for a, b in zip(*moved, strict=True)]
    for mine, other, right, edge in zip(fused, plain, exact, edges, strict=True):
        right = right.cuda()
        # With one token a rounding is shared by a whole row or column: nothing averages out.
        slack = 0.02 if case.get("tokens") == 1 else 0.003
        allowed = 1.25 * (other.double() - right).norm() + slack * right.norm() + edge
        assert (mine.double() - right).norm() <= allowed
    again = layer_gradients(module, provider, parts)
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))


@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("hidden", "tokens"), [(192, 3000), (2048, 3000), (2048, 200), (8192, 700)]
)
def test_repeats_to_the_bit(tests, rank, hidden, tokens, monkeypatch):
    """A product that still reads what the next load overwrites gives other bits at each run."""
    tests.H, tests.I = hidden, 256
    ranks = (rank,), (rank,)
    module, provider, parts = layer_of(tests, "concatenated", ranks, tokens=tokens)
    fused, plain = both_ways(module, provider, parts, monkeypatch)
    for mine, other in zip(fused, plain, strict=True):
        assert (mine - other).double().norm() < 0.012 * other.double().norm()
    x, index, weights = parts
    for _ in range(200):
        draw = torch.randn_like(x, requires_grad=True), index, weights
        first, again = (layer_gradients(module, provider, draw) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("style", ["concatenated", "transposed"])
@pytest.mark.parametrize("tokens", [5, 37, 150, 500, 2000])
def test_every_kind_and_dtype(tests, kind, dtype, style, tokens, monkeypatch):
    for lora in (dtype, torch.float32):  # whose gradients are float32
        module, provider, parts = layer_of(
            tests, style, ((8,), (3,)), dtype, lora, kind, tokens=tokens
        )
        fused, plain = both_ways(module, provider, parts, monkeypatch)
        assert [g.dtype for g in fused[3:]] == [lora] * 4
        for mine, other in zip(fused, plain, strict=True):
            assert (mine - other).double().norm() < 0.02 * other.double().norm()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("style", ["concatenated", "interleaved"])
def test_compiles_whole(tests, style, monkeypatch):
    module, provider, parts = layer_of(tests, style, ((8,), (8,)))
    plain = layer_gradients(module, provider, parts)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    calls = []
    real = fused.make_layer
    monkeypatch.setattr(fused, "make_layer", lambda *a: calls.append(1) or real(*a))
    for mine, other in zip(layer_gradients(compiled, provider, parts), plain, strict=True):
        assert torch.equal(mine, other)
    assert calls


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_no_wait_for_the_device_and_graphs(tests):
    module, provider, parts = layer_of(tests, "concatenated", ((8,), (8,)), tokens=300)
    plain = layer_gradients(module, provider, parts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer_gradients(module, provider, parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    leaves = [parts[0], parts[2], *provider.leaves()]
    seed = torch.ones_like(plain[0])
    with torch.cuda.stream(stream):
        torch.autograd.grad(module(*parts), leaves, seed)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = module(*parts)
        grads = torch.autograd.grad(out, leaves, seed)
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.autograd.grad(module(*parts), leaves, seed)
    assert torch.equal(out, plain[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


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
        return projection._PackedProduct.apply(packed, transposed, False, offsets, x)

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
    style = test_forward.STYLES["interleaved"]
    module = test_forward.pack(test_forward.make(style, torch.bfloat16), style).to("cuda")
    x, index, weights = (
        t.detach().cuda() for t in test_forward.routing(torch.bfloat16, tokens=8192)
    )
    module(x, index, weights).sum().backward()
    wanted = torch.zeros(test_forward.E, dtype=torch.float64, device="cuda")
    wanted.index_add_(0, index.flatten(), weights.flatten().double())
    grad = module.down_proj_bias.grad.double()
    assert ((grad - wanted[:, None]).abs() <= 0.01 * wanted[:, None]).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait_for_the_device(monkeypatch):
    style = test_forward.STYLES["concatenated"]
    monkeypatch.setattr(test_forward, "H", 64)
    monkeypatch.setattr(test_forward, "I", 32)
    module = test_forward.pack(test_forward.make(style, torch.bfloat16), style).to("cuda")
    x, index, weights = (t.detach().to("cuda") for t in test_forward.routing(torch.bfloat16))
    x.requires_grad_()
    module(x, index, weights).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x, index, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
