"""The grouped backend against the reference one, in fp64 and bf16, on odd shapes."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.kernels import projection

IN, OUT, E, K = 24, 40, 5, 2


def setup(*, gathers, scatters, transposed, tokens=29, ranks=(3, 16), seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    stack = rand(E, IN, OUT) if transposed else rand(E, OUT, IN)
    allowed = torch.tensor([0, 1, 3, 4])
    index = torch.stack([allowed[torch.randperm(4, generator=g)[:K]] for _ in range(tokens)])
    ids, order = index.reshape(-1).sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(E + 1))
    rows = projection.Rows(order, offsets, K, gathers, scatters)
    count = tokens if gathers else tokens * K
    scale = rand(tokens * K) if scatters else None
    terms = [
        projection.LoraInputs(
            rand(count, IN) if i else None,
            rand(E * r, IN),
            rand(OUT, r * E),
            0.5 + i,
            torch.float32,
        )
        for i, r in enumerate(ranks)
    ]
    return rand(count, IN), stack, rows, scale, rand(E, OUT), terms, rand


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, projection.LoraInputs):
        dropped = None if value.dropped is None else value.dropped.to(dtype)
        return projection.LoraInputs(
            dropped, value.a.to(dtype), value.b.to(dtype), value.scaling, dtype
        )
    return value


def run(backend, parts, dtype, grad):
    x, stack, rows, scale, bias, terms, _ = parts
    transposed = stack.shape[1] == IN
    stack = stack.to(dtype)
    weight = projection.Weight(lambda a, b: stack[a:b], E, OUT, transposed, dtype)
    terms = [cast(term, dtype) for term in terms]
    scale, bias = cast(scale, dtype), cast(bias, dtype)
    operands = projection.Operands(cast(x, dtype), weight, rows, scale, bias, terms)
    both = [True, True]
    needs = projection.Needs(True, scale is not None, True, [False, True], both, both)
    out = backend.forward(operands)
    grads = backend.backward(cast(grad, dtype), operands, needs)
    return [out, grads.x, grads.scale, grads.bias, *grads.dropped, *grads.a, *grads.b]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("way", [(True, False), (False, True), (False, False)])
def test_equals_the_reference(transposed, way):
    gathers, scatters = way
    check(setup(gathers=gathers, scatters=scatters, transposed=transposed))


def check(parts):
    rand, rows = parts[-1], parts[2]
    grad = rand(rows.outputs, OUT)
    exact = run(projection.LOOP, parts, torch.float64, grad)
    ours = run(projection.GROUPED, parts, torch.float32, grad)
    theirs = run(projection.LOOP, parts, torch.float32, grad)
    for right, mine, other in zip(exact, ours, theirs, strict=True):
        assert (right is None) == (mine is None)
        if right is not None:
            scale = right.norm()
            error, allowed = (mine - right).norm() / scale, (other - right).norm() / scale
            # Both round to bf16 in places of their own; neither may be far behind.
            assert error <= 1.5 * allowed + 1e-6, (float(error), float(allowed))


@pytest.mark.parametrize("way", [(True, False), (False, True)])
def test_by_the_own_grouped_matmul(way, request):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU is there, and with it the compiled kernels")
    for fixture in ("interpreted", "own_grouped_mm"):
        request.getfixturevalue(fixture)
    gathers, scatters = way
    check(setup(gathers=gathers, scatters=scatters, transposed=gathers))
