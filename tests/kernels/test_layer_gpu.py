"""On a CUDA device: the whole-layer kernels, from decoding to a module's gradients."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.experts import backend, fused, operands
from moe_qlora.experts.backend import plain_gate
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings
from tests.unit.experts import test_forward

pytestmark = pytest.mark.gpu

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False), ("int8", False)]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def scratch():
    from moe_qlora.kernels import workspace

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


def settings(kind, double):
    return CodecSettings(kind, double, torch.int8 if kind == "int8" else torch.uint8)


@pytest.mark.parametrize(("kind", "double"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_decode_equals_bitsandbytes(kind, double, dtype):
    from moe_qlora.kernels import grouped_mm

    for shape in [(5, 24, 40), (4, 64, 128), (3, 200, 1400), (2, 1, 8)]:
        weight = torch.randn(shape, device="cuda", dtype=dtype)
        stack = codec.pack(weight, settings(kind, double))
        expected = codec.unpack(stack)
        out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        grouped_mm.decode(stack, out)
        assert torch.equal(out, expected)


def test_decodes_beyond_int32():
    from moe_qlora.kernels import grouped_mm

    weight = torch.empty(33, 8192, 8192, device="cuda", dtype=torch.bfloat16).normal_()
    stack = codec.pack(weight, settings("nf4", True))
    del weight
    out = torch.full((33, 8192, 8192), float("nan"), device="cuda", dtype=torch.bfloat16)
    grouped_mm.decode(stack, out)
    for e in (0, 31, 32):
        assert torch.equal(out[e : e + 1], codec.unpack_range(stack, e, e + 1))


def on_gpu(tests, style, dtype, **kwargs):
    module = tests.make(style, dtype)
    del module.alpha  # numbers, as in transformers' own classes
    module.alpha, module.limit = 1.3, 0.4
    return tests.pack(module, style, **kwargs).to("cuda")


def provider_of(tests, style, dtype, ranks):
    provider = tests.Provider(style, ranks=ranks, dtype=dtype)
    for name, terms in provider.all.items():
        provider.all[name] = tuple(
            operands.LoraFactors(
                t.a.detach().cuda().requires_grad_(), t.b.detach().cuda().requires_grad_(), 0.5
            )
            for t in terms
        )
    return provider


def routed(tests, dtype, **kwargs):
    x, index, weights = tests.routing(dtype, **kwargs)
    return (
        x.detach().cuda().requires_grad_(),
        index.cuda(),
        weights.detach().cuda().requires_grad_(),
    )


def gradients(module, provider, x, index, weights, call=None):
    leaves = [x, weights, *(provider.leaves() if provider else [])]
    run = module if call is None else call  # a compiled module has no truth value
    out = run(x, index, weights)
    g = torch.Generator("cuda").manual_seed(9)
    seed = torch.randn(out.shape, generator=g, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


def both_ways(module, provider, parts, monkeypatch):
    """Outputs and gradients of the kernels, and of the projections one by one."""
    assert choice(module, parts[0]) == backend.FUSED
    fused = gradients(module, provider, *parts)
    real = backend.kernels_run
    monkeypatch.setattr(backend, "kernels_run", lambda device: False)
    plain = gradients(module, provider, *parts)
    monkeypatch.setattr(backend, "kernels_run", real)
    return fused, plain


def choice(module, x):
    return backend.choose_backend(module, backend.read_call(module, x))


def in_fp64(tests, style, module, provider, parts, dtype, limit=0.4):
    """The unit tests' plain loops in fp64 on the CPU, over the same decoded weights."""
    wide = tests.make(style, torch.float64)
    if style.clamped:
        wide._apply_gate = lambda pre: plain_gate(pre, "silu", True, True, limit, 1.3, 1.0)
    for name in tests.names(style):
        setattr(wide, name, torch.nn.Parameter(getattr(module, name).detach().double().cpu()))
        if style.bias:
            bias = getattr(module, f"{name}_bias").detach().double().cpu()
            setattr(wide, f"{name}_bias", torch.nn.Parameter(bias))
    x, index, weights = parts
    x, weights = (t.detach().double().cpu().requires_grad_() for t in (x, weights))
    twin = None
    if provider is not None:
        twin = tests.Provider(style, ranks=((1,), (1,)))
        for name, terms in provider.all.items():
            twin.all[name] = tuple(
                operands.LoraFactors(
                    t.a.detach().double().cpu().requires_grad_(),
                    t.b.detach().double().cpu().requires_grad_(),
                    t.scaling,
                )
                for t in terms
            )
    leaves = [x, weights, *(twin.leaves() if twin else [])]
    out = tests.slow(wide, style, twin, x, index.cpu(), weights)
    g = torch.Generator("cuda").manual_seed(9)
    seed = torch.randn(out.shape, generator=g, device="cuda").to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.double().cpu())]


STYLES = ["concatenated", "transposed", "biased", "interleaved", "non-gated",
          "non-gated-transposed-biased"]  # fmt: skip
ROUTINGS = {
    "usual": {},
    "one token": {"tokens": 1},
    "many": {"tokens": 700},
    "thousands": {"tokens": 3000},
    "empty experts": {"empty": (0, 4)},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("ranks", [((16,), (16,)), ((3,), (128,)), ((), (1,)), ((4,), (2,))])
def test_module_is_as_exact_as_its_projections(tests, style, case, ranks, monkeypatch):
    style = tests.STYLES[style]
    dtype = torch.bfloat16
    module = on_gpu(tests, style, dtype)
    module.requires_grad_(False)
    provider = provider_of(tests, style, dtype, ranks)
    operands.set_lora_source(module, provider)
    parts = routed(tests, dtype, **case)
    fused, plain = both_ways(module, provider, parts, monkeypatch)
    exact = in_fp64(tests, style, module, provider, parts, dtype)
    # A rounding beside a clamp's edge switches an element's gradient: as much as moving the edges
    # by a rounding does, of sums of up to 5. (On the CPU, one weight in 30 rounded otherwise makes
    # errors of 18 % out of 4 %.)
    edges = [0.0] * len(exact)
    if style.clamped:
        moved = [
            in_fp64(tests, style, module, provider, parts, dtype, limit=0.4 + side / 100)
            for side in (-1, 1)
        ]
        edges = [float((a - b).norm()) for a, b in zip(*moved, strict=True)]
    for mine, other, right, edge in zip(fused, plain, exact, edges, strict=True):
        right = right.cuda()
        # With one token a rounding is shared by a whole row or column: nothing averages out.
        slack = 0.02 if case.get("tokens") == 1 else 0.003
        allowed = 1.25 * (other.double() - right).norm() + slack * right.norm() + edge
        assert (mine.double() - right).norm() <= allowed
    again = gradients(module, provider, *parts)
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))


@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("hidden", "tokens"), [(192, 3000), (2048, 3000), (2048, 200), (8192, 700)]
)
def test_repeats_to_the_bit(tests, rank, hidden, tokens, monkeypatch):
    """A product that still reads what the next load overwrites gives other bits at each run."""
    tests.H, tests.I = hidden, 256
    style = tests.STYLES["concatenated"]
    module = on_gpu(tests, style, torch.bfloat16)
    provider = provider_of(tests, style, torch.bfloat16, ((rank,), (rank,)))
    operands.set_lora_source(module, provider)
    parts = routed(tests, torch.bfloat16, tokens=tokens)
    fused, plain = both_ways(module, provider, parts, monkeypatch)
    for mine, other in zip(fused, plain, strict=True):
        assert (mine - other).double().norm() < 0.012 * other.double().norm()
    x, index, weights = parts
    for _ in range(200):
        draw = torch.randn_like(x, requires_grad=True), index, weights
        first, again = (gradients(module, provider, *draw) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("style", ["concatenated", "transposed"])
@pytest.mark.parametrize("tokens", [5, 37, 150, 500, 2000])
def test_every_kind_and_dtype(tests, kind, dtype, style, tokens, monkeypatch):
    style = tests.STYLES[style]
    module = on_gpu(tests, style, dtype, kind=kind)
    for lora in (dtype, torch.float32):  # whose gradients are float32
        provider = provider_of(tests, style, lora, ((8,), (3,)))
        operands.set_lora_source(module, provider)
        parts = routed(tests, dtype, tokens=tokens)
        fused, plain = both_ways(module, provider, parts, monkeypatch)
        assert [g.dtype for g in fused[3:]] == [lora] * 4
        for mine, other in zip(fused, plain, strict=True):
            assert (mine - other).double().norm() < 0.02 * other.double().norm()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("style", ["concatenated", "interleaved"])
def test_compiles_whole(tests, style, monkeypatch):
    style = tests.STYLES[style]
    module = on_gpu(tests, style, torch.bfloat16)
    module.requires_grad_(False)
    provider = provider_of(tests, style, torch.bfloat16, ((8,), (8,)))
    operands.set_lora_source(module, provider)
    parts = routed(tests, torch.bfloat16)
    plain = gradients(module, provider, *parts)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    calls = []
    real = fused.make_layer
    monkeypatch.setattr(fused, "make_layer", lambda *a: calls.append(1) or real(*a))
    for mine, other in zip(gradients(module, provider, *parts, call=compiled), plain, strict=True):
        assert torch.equal(mine, other)
    assert calls


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_no_wait_for_the_device_and_graphs(tests):
    style = tests.STYLES["concatenated"]
    module = on_gpu(tests, style, torch.bfloat16)
    provider = provider_of(tests, style, torch.bfloat16, ((8,), (8,)))
    operands.set_lora_source(module, provider)
    parts = routed(tests, torch.bfloat16, tokens=300)
    plain = gradients(module, provider, *parts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(module, provider, *parts)
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
