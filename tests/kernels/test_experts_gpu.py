"""On a CUDA device: the grouped backend, whole models, and no wait for the device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts.backend import runs_grouped
from moe_qlora.kernels import projection

pytestmark = pytest.mark.gpu

IN, OUT, E, K = 256, 320, 7, 3


def rows(tokens: int, way: tuple[bool, bool]) -> projection.Rows:
    index = torch.stack([torch.randperm(E, device="cuda")[:K] for _ in range(tokens)])
    ids, order = index.reshape(-1).sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(E + 1, device="cuda"))
    return projection.Rows(order, offsets, K, *way)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("way", [(True, False), (False, True)])
@pytest.mark.parametrize("tokens", [1, 77, 1000])
def test_grouped_equals_fp64(transposed, way, tokens):
    torch.manual_seed(tokens)
    sorted_rows = rows(tokens, way)
    stack = torch.randn(E, *((IN, OUT) if transposed else (OUT, IN)), device="cuda") / 16
    count = tokens if way[0] else tokens * K
    x, bias = torch.randn(count, IN, device="cuda"), torch.randn(E, OUT, device="cuda")
    scale = torch.rand(tokens * K, device="cuda") if way[1] else None
    a, b = torch.randn(E * 16, IN, device="cuda") / 16, torch.randn(OUT, 16 * E, device="cuda")
    grad = torch.randn(sorted_rows.outputs, OUT, device="cuda")
    stack, x, a, b, bias, grad = (t.bfloat16() for t in (stack, x, a, b, bias, grad))

    def run(backend, dtype):
        weight = projection.Weight(lambda i, j: stack[i:j].to(dtype), E, OUT, transposed, dtype)
        term = projection.LoraInputs(None, a.to(dtype), b.to(dtype), 0.5, dtype)
        factor = None if scale is None else scale.bfloat16().to(dtype)
        operands = projection.Operands(
            x.to(dtype), weight, sorted_rows, factor, bias.to(dtype), [term]
        )
        if backend is projection:
            assert runs_grouped(stack.shape, operands.x, dtype, (dtype,))
        needs = projection.Needs(True, scale is not None, True, [False], [True], [True])
        grads = backend.backward(grad.to(dtype), operands, needs)
        out = backend.forward(operands)
        return [out, grads.x, grads.scale, grads.bias, grads.a[0], grads.b[0]]

    exact, plain = run(projection.LOOP, torch.float64), run(projection.LOOP, torch.bfloat16)
    first, second = run(projection.GROUPED, torch.bfloat16), run(projection.GROUPED, torch.bfloat16)
    for right, mine, other in zip(exact, first, plain, strict=True):
        if right is not None:
            # As exact as bf16 allows: the row-by-row backend rounds as often, elsewhere.
            allowed = 1.5 * (other.double() - right).norm() + 0.005 * right.norm()
            assert (mine.double() - right).norm() <= allowed
    assert all(p is None or torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("bits", ["4", "8"])
def test_a_model_trains_as_its_decoded_twin(bits):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=128, moe_intermediate_size=64, intermediate_size=128,
        num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    settings = BitsAndBytesConfig(
        load_in_4bit=bits == "4",
        load_in_8bit=bits == "8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    moe_qlora.quantize_experts(model, settings)
    ids = torch.randint(0, 256, (2, 64), device="cuda")
    ours = model(ids, labels=ids)
    model.set_experts_implementation("eager")
    theirs = model(ids, labels=ids)
    assert (ours.logits - theirs.logits).norm() < 0.02 * theirs.logits.norm()
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait_for_the_device():
    spec = importlib.util.spec_from_file_location(
        "experts_tests", Path(__file__).parents[1] / "unit" / "experts" / "test_forward.py"
    )
    assert spec is not None and spec.loader is not None
    tests = sys.modules["experts_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    style = tests.STYLES["concatenated"]
    tests.H, tests.I = 64, 32
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
