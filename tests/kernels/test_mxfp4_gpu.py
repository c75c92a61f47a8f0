"""On a CUDA device: experts that keep MXFP4 codes, from decoding to a module's gradients."""

import copy

import pytest
import torch
from torch import nn

from moe_qlora.experts import backend, operands
from moe_qlora.experts import forward as experts
from moe_qlora.packing import codec, parametrize
from moe_qlora.testing import tiny_config
from tests.helpers.lora_layer import Provider
from tests.helpers.mxfp4 import keep, random_mxfp4, slow_decode

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
NAMES = ("gate_up_proj", "down_proj")
OSS = 2880  # gpt-oss-20b's hidden and intermediate sizes: whole blocks of 32, and steps of 64


def weight(*shape: int, transposed: bool = False, dtype: torch.dtype = torch.bfloat16, seed=0):
    """A packed weight on the device, and its decoded values as stored, on the CPU."""
    blocks, scales = random_mxfp4(*shape, seed=seed)
    packed = keep(blocks, scales, transposed=transposed, dtype=dtype)
    return packed.to("cuda"), slow_decode(blocks, scales)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(5, 24, 32), (3, 200, 1440), (2, 17, 96), (2, 320, OSS)])
def test_decode_equals_the_definition(dtype, shape):
    from moe_qlora.kernels import grouped_mm

    packed, expected = weight(*shape, dtype=dtype)
    out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
    grouped_mm.decode(packed, out)
    assert torch.equal(out.cpu(), expected.to(dtype))
    assert torch.equal(codec.unpack(packed).cpu(), expected.to(dtype))


def layer(hidden: int, inner: int, count: int, dtype: torch.dtype):
    """gpt-oss's experts on kept codes, and the same with the dequantized weights in fp64."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = copy.deepcopy(tiny_config("gpt_oss"))
    config.hidden_size, config.intermediate_size = hidden, inner
    config.num_local_experts = count
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = GptOssExperts(config).to(dtype)
    module.requires_grad_(False)
    for name in NAMES:
        nn.init.normal_(getattr(module, f"{name}_bias"), std=0.3)
        nn.init.zeros_(getattr(module, name))
    wide = copy.deepcopy(module).double()
    host = nn.Module()
    host.config, host.experts = config, module
    for seed, (name, shape) in enumerate(
        zip(NAMES, ((count, 2 * inner, hidden), (count, hidden, inner)), strict=True)
    ):
        packed, stored = weight(*shape, transposed=True, dtype=dtype, seed=seed)
        parametrize.attach(module, name, packed)
        getattr(wide, name).data = stored.transpose(1, 2).double().cuda()
    experts.activate(host, ["experts"])
    return module, wide


def added(wide: nn.Module, provider: Provider, count: int) -> list[torch.Tensor]:
    """Put the sum of base and LoRA into the plain module; return the factors that it is made of."""
    twin = provider.to("cuda", torch.float64)
    for name in NAMES:
        [factors] = twin.all[name]
        a, b = factors.a, factors.b
        products = torch.einsum(
            "ore,eri->eio", b.view(b.shape[0], -1, count), a.view(count, -1, a.shape[1])
        )
        base = getattr(wide, name).detach()
        del wide._parameters[name]
        setattr(wide, name, base + products * factors.scaling)
    return twin.leaves()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "few"), [(40, True), (700, True), (700, False)])
@pytest.mark.parametrize(("hidden", "inner", "count"), [(96, 160, 5), (OSS, OSS, 3)])
def test_a_layer_in_both_directions(hidden, inner, count, tokens, few, dtype, monkeypatch):
    from moe_qlora.kernels import grouped_mm, quantized_mm, quantized_mm_hopper, table, workspace

    module, wide = layer(hidden, inner, count, dtype)
    sizes = {NAMES[0]: (2 * inner, hidden), NAMES[1]: (hidden, inner)}
    provider = Provider(sizes, count, dtype).to("cuda", dtype)
    operands.set_lora_source(module, provider)
    x = (torch.randn(tokens, hidden, device="cuda") * 0.3).to(dtype).requires_grad_()
    index = torch.rand(tokens, count, device="cuda").topk(2, -1).indices
    weights = torch.rand(tokens, 2, device="cuda").to(dtype).requires_grad_()
    assert backend.choose_backend(module, backend.read_call(module, x)) == backend.FUSED
    decoded = []
    real = grouped_mm.decode
    monkeypatch.setattr(grouped_mm, "decode", lambda *a, **k: decoded.append(1) or real(*a, **k))
    for module_ in (quantized_mm, quantized_mm_hopper):
        monkeypatch.setattr(module_, "prefers_quantized", lambda *args, **kwargs: few)
    if not few:  # nor weights in registers
        monkeypatch.setattr(table, "KERNELS", [k for k in table.kernels() if not k.on_codes])
    module(x, index, weights).sum().backward()  # a kernel is tried once, on weights it decodes
    decoded.clear()
    workspace.release_workspace()
    out = module(x, index, weights)
    seed = torch.randn(out.shape, device="cuda").to(dtype)
    grads = torch.autograd.grad(out, [x, weights, *provider.leaves()], seed)
    assert bool(decoded) != few
    leaves = added(wide, provider, count)
    wide_x, wide_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    right = plain(wide, wide_x, index, wide_weights)
    expected = torch.autograd.grad(right, [wide_x, wide_weights, *leaves], seed.double())
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for mine, other in zip([out, *grads], [right, *expected], strict=True):
        error = (mine.detach().double() - other.detach()).norm() / other.detach().norm()
        assert error < limit, float(error)


def plain(wide: nn.Module, x, index, weights):
    """Token by token's sum over its experts, expert by expert."""
    out = torch.zeros_like(x)
    for e in range(len(wide.gate_up_proj)):
        token, slot = (index == e).nonzero(as_tuple=True)
        pre = x[token] @ wide.gate_up_proj[e] + wide.gate_up_proj_bias[e]
        y = wide._apply_gate(pre) @ wide.down_proj[e] + wide.down_proj_bias[e]
        out = out.index_add(0, token, y * weights[token, slot][:, None])
    return out
