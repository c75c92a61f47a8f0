"""gpt-oss's experts on their MXFP4 codes: stored transposed, interleaved, biased."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_qlora.experts import backend, operands
from moe_qlora.experts import forward as experts
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model
from tests.helpers.lora_layer import Provider, layer_gradients
from tests.helpers.mxfp4 import mxfp4_weight

E, H, INNER, K, T = 3, 32, 96, 2, 11
NAMES = ("gate_up_proj", "down_proj")
SHAPES = ((E, 2 * INNER, H), (E, H, INNER))  # as stored, (E, out, in)


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert error(ours, theirs) < tolerance, error(ours, theirs)


def error(ours, theirs):
    difference = (ours - theirs).detach().double().norm()
    return float(difference / theirs.detach().double().norm().clamp_min(1e-12))


@pytest.fixture
def layer():
    """An fp16 experts module on MXFP4 codes with LoRA, and x, index, weights."""
    sizes = {"hidden_size": H, "intermediate_size": INNER, "num_local_experts": E}
    model = tiny_model("gpt_oss", dtype=torch.float16, num_hidden_layers=1, **sizes)
    module = model.requires_grad_(False).model.layers[0].mlp.experts
    for seed, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True)):
        nn.init.normal_(getattr(module, f"{name}_bias"), std=0.3)
        packed = mxfp4_weight(*shape, seed=seed, transposed=True, dtype=torch.float16)
        parametrize.attach(module, name, packed)
    assert experts.activate(model, ["model.layers.0.mlp.experts"]) == ()
    torch.manual_seed(3)
    provider = Provider({NAMES[0]: (2 * INNER, H), NAMES[1]: (H, INNER)}, E, torch.float16)
    operands.set_lora_source(module, provider)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(T, H, generator=generator).half().requires_grad_()
    weights = torch.rand(T, K, generator=generator).half().requires_grad_()
    index = torch.rand(T, E, generator=generator).topk(K, -1).indices
    return module, provider, (x, index, weights)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_kernels_equal_the_projections_eager_and_compiled(layer, few, monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("a GPU is there, and with it the compiled kernels")
    from moe_qlora.kernels import table

    module, provider, parts = layer
    slow = layer_gradients(module, provider, parts)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    graph = layer_gradients(compiled, provider, parts)  # projection by projection
    for mine, other in zip(graph, slow, strict=True):
        close(mine, other, 4e-3)
    torch.compiler.reset()
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    if not few:
        monkeypatch.setattr(table, "KERNELS", [k for k in table.kernels() if not k.on_codes])
    call = backend.read_call(module, parts[0])
    assert backend.choose_backend(module, call) == backend.FUSED
    eager = layer_gradients(module, provider, parts)
    for mine, other in zip(eager, slow, strict=True):
        close(mine, other, 4e-3)
    graph = layer_gradients(
        torch.compile(module, fullgraph=True, backend="aot_eager"), provider, parts
    )
    for mine, other in zip(graph, eager, strict=True):
        assert torch.equal(mine, other)
