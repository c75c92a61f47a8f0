"""Linear layers with one input and LoRA, as one operator, against the formula in float64."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import bitsandbytes as bnb
import pytest
import torch
from late_streams import assert_joined, run_late
from torch import Tensor

from moe_qlora.memory import levels
from moe_qlora.speed import lora_linears
from moe_qlora.speed.lora_linears import Adapted, compute, describe, register

IN, OUT, RANKS = 64, (24, 7, 16), (3, 1, 4)
PACKED = [("nf4", False), ("nf4", True), ("fp4", True)]


@pytest.fixture(autouse=True)
def operators() -> None:
    register()


class Group(NamedTuple):
    """Layers, and what they compute with."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    adapted: Adapted


def group(
    dtype: torch.dtype,
    *,
    owners: tuple[int, ...] = (0, 1, 2),
    biased: tuple[int, ...] = (1,),
    packed: tuple[str, bool] | None = None,
) -> Group:
    """Three layers: all packed by bitsandbytes, as (type, double quantization), or none."""
    torch.manual_seed(0)
    weights = [torch.randn(out, IN, dtype=dtype) for out in OUT]
    biases = [torch.randn(out, dtype=dtype) if i in biased else None for i, out in enumerate(OUT)]
    described = []
    for i, weight in enumerate(weights):
        state, given = None, weight
        if packed is not None:
            given, state = bnb.functional.quantize_4bit(
                weight, quant_type=packed[0], compress_statistics=packed[1]
            )
            weights[i] = bnb.functional.dequantize_4bit(given, state)
        described.append(describe(given, biases[i], state))
    a, b = [], []
    for owner, rank in zip(owners, RANKS, strict=False):
        a.append(torch.randn(rank, IN, dtype=dtype, requires_grad=True))
        b.append(torch.randn(OUT[owner], rank, dtype=dtype, requires_grad=True))
    scalings = [0.5 + i for i in range(len(owners))]
    return Group(weights, biases, Adapted(described, a, b, owners, scalings))


def reference(x: Tensor, made: Group) -> list[Tensor]:
    outs = []
    for i, (weight, bias) in enumerate(zip(made.weights, made.biases, strict=True)):
        y = x @ weight.t().to(x.dtype)
        y = y if bias is None else y + bias.to(x.dtype)
        for owner, a, b, scaling in zip(*_adapters(made, x.dtype), strict=True):
            if owner == i:
                y = y + scaling * (x @ a.t()) @ b.t()
        outs.append(y)
    return outs


def _adapters(made: Group, dtype: torch.dtype) -> tuple[Any, ...]:
    _, a, b, owners, scalings = made.adapted
    return owners, [each.to(dtype) for each in a], [each.to(dtype) for each in b], scalings


def gradients(outs: list[Tensor], x: Tensor, made: Group, used: Any) -> list[Tensor]:
    weights = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outs]
    loss = sum((outs[i] * weights[i]).sum() for i in used)
    inputs = [*([x] if x.requires_grad else []), *made.adapted.a, *made.adapted.b]
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return list(grads)


@pytest.mark.parametrize("owners", [(0, 1, 2), (2, 2), (1,)])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
def test_a_second_stream_may_be_late(
    used: Any, owners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = group(torch.float64, owners=owners)
    x = torch.randn(2, 5, IN, dtype=torch.float64, requires_grad=True)
    run_late(monkeypatch)
    ours, wanted = compute(x, made.adapted), reference(x, made)
    got = [*ours, *gradients(ours, x, made, used)]
    assert_joined()
    for a, b in zip(got, [*wanted, *gradients(wanted, x, made, used)], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("owners", [(0, 1, 2), (2, 2), (1,)])
@pytest.mark.parametrize("shape", [(6, IN), (2, 5, IN), (1, IN), (0, IN)])
def test_outputs_and_gradients(shape: Any, owners: Any, used: Any, needs_x: bool) -> None:
    made = group(torch.float64, owners=owners)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_(needs_x)
    if not needs_x and not {*used} & {*owners}:
        return  # no gradient flows
    ours, wanted = compute(x, made.adapted), reference(x, made)
    assert [out.shape for out in ours] == [out.shape for out in wanted]
    got = [*ours, *gradients(ours, x, made, used)]
    for a, b in zip(got, [*wanted, *gradients(wanted, x, made, used)], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("packed", PACKED)
def test_packed_layers(packed: tuple[str, bool]) -> None:
    made = group(torch.float32, packed=packed, owners=(0, 2))
    x = torch.randn(2, 5, IN, requires_grad=True)
    ours, wanted = compute(x, made.adapted), reference(x, made)
    got = [*ours, *gradients(ours, x, made, (0, 1, 2))]
    for a, b in zip(got, [*wanted, *gradients(wanted, x, made, (0, 1, 2))], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once_less_than_sums_of_products(dtype: torch.dtype) -> None:
    made = group(dtype)
    x = torch.randn(40, IN).to(dtype)
    with torch.no_grad():
        exact = reference(x.double(), made)
        errors = [
            sum(float((a.double() - b).norm()) for a, b in zip(outs, exact, strict=True))
            for outs in (compute(x, made.adapted), reference(x, made))
        ]
    assert errors[0] <= 1.02 * errors[1]


def test_gradients_that_are_not_contiguous() -> None:
    made = group(torch.float64)
    x = torch.randn(4, 6, IN, dtype=torch.float64, requires_grad=True)
    found = []
    for outs in (compute(x, made.adapted), reference(x, made)):
        loss = sum((out.transpose(0, 1) ** 2).sum() + out.sum() for out in outs)
        found.append(torch.autograd.grad(loss, [x, *made.adapted.a, *made.adapted.b]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("packed", [None, *PACKED])
@pytest.mark.parametrize("biased", [(), (0, 2)])
def test_shapes_for_compilers_are_those_that_come(
    needs_x: bool, packed: Any, biased: tuple[int, ...]
) -> None:
    made = group(torch.float32, biased=biased, packed=packed)
    x = torch.randn(2, 5, IN, requires_grad=needs_x)
    frozen, *factors = made.adapted
    tensors = [tensor for each in frozen for tensor in each.tensors]
    numbers = [number for each in frozen for number in each.numbers]
    a, b, owners, scalings = factors
    args = (x, tensors, list(a), list(b), numbers, list(owners), scalings)
    torch.library.opcheck(torch.ops.moe_qlora.lora_linears.default, args)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own choices
@pytest.mark.parametrize(
    ("level", "compiles"),
    [(level, False) for level in levels.EVERY] + [(level, True) for level in levels.EVERY[1:-1]],
)
@pytest.mark.parametrize("features", [200, 300])
def test_what_a_level_keeps(
    level: str, compiles: bool, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = 256  # the least inner dimension of a product that is kept
    a, b = torch.randn(2, wide, requires_grad=True), torch.randn(features, 2, requires_grad=True)
    frozen = describe(torch.randn(features, wide), None)
    made = Adapted([frozen], [a, a], [b, b], (0, 0), (1.0, 1.0))  # Two adapters of one layer
    runs = []

    def counting(rows: Tensor, weight: Tensor, *bias: Any) -> Tensor:
        runs.append(len(weight))
        return torch.nn.functional.linear(rows, weight, *bias)

    real = torch.mm

    def counting_mm(rows: Tensor, factor: Tensor, *, out: Tensor) -> Tensor:
        runs.append(out.shape[1])
        return real(rows, factor, out=out)

    monkeypatch.setattr(lora_linears, "linear", counting)
    monkeypatch.setattr(torch, "mm", counting_mm)
    x = torch.randn(3, wide, requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        run = levels.runner(lambda x: compute(x.sin(), made)[0].tanh(), compiles=compiles)
    run(level, (x,), {}).sum().backward()
    assert runs.pop() == wide  # dA, the last product of backward by `torch.mm`
    kept = level in (levels.PROJECTIONS, levels.KEEP) or (
        level == levels.NARROW and features == 200
    )
    assert runs == [4, features] * (1 if kept else 2)


def test_a_second_derivative_raises() -> None:
    made = group(torch.float64)
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    out = compute(x, made.adapted)[0]
    (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        grad.sum().backward()
