"""A whole module through a GPU's kernels, in Triton's interpreter: eager, compiled, refused."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from moe_qlora.experts import forward as experts
from moe_qlora.experts import fused
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_config

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")
NAMES = ("gate_up_proj", "down_proj")
E, H, INNER, K, T = 6, 64, 128, 2, 11


class Provider:
    """LoRA of ranks 3 and 5."""

    def __init__(self, dtype):
        def term(rank, out, into):
            a, b = torch.randn(E * rank, into), torch.randn(out, rank * E)
            leaves = [(t * 0.1).to(dtype).requires_grad_() for t in (a, b)]
            return experts.LoraFactors(*leaves, 0.5)

        self.all = {NAMES[0]: (term(3, 2 * INNER, H),), NAMES[1]: (term(5, H, INNER),)}

    def active_lora(self, name):
        return self.all[name]

    def leaves(self):
        return [leaf for terms in self.all.values() for term in terms for leaf in (term.a, term.b)]


@pytest.fixture
def case(monkeypatch):
    """A packed module of transformers' in fp16 with LoRA, its provider, and x, index, weights."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    config = copy.deepcopy(tiny_config("qwen3_moe"))
    config.hidden_size, config.moe_intermediate_size = H, INNER
    config.num_experts, config.num_experts_per_tok = E, K
    config._experts_implementation = "eager"
    host = nn.Module()
    host.config, host.experts = config, Qwen3MoeExperts(config).half()
    host.requires_grad_(False)
    for name in NAMES:
        parameter = getattr(host.experts, name)
        nn.init.normal_(parameter, std=0.1)
        packed = codec.pack(parameter.data, CodecSettings("nf4", True, torch.uint8))
        parametrize.attach(host.experts, name, packed)
    experts.activate(host, ["experts"])
    provider = Provider(torch.float16)
    experts.set_lora_source(host.experts, provider)
    monkeypatch.setattr(fused, "available", lambda device: True)
    x = torch.randn(T, H).half().requires_grad_()
    weights = torch.rand(T, K).half().requires_grad_()
    return host.experts, provider, (x, torch.rand(T, E).topk(K, -1).indices, weights)


def gradients(run, provider, parts):
    """The output, and the gradients of x, the routing weights and the factors."""
    out = run(*parts)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [parts[0], parts[2], *provider.leaves()], seed)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_eager_equals_the_projections_and_compiled_equals_eager(case, monkeypatch):
    module, provider, parts = case
    ran = []
    real = fused._layer
    fields = ("gate", "scalings", "transposed", "partial", "dtype")

    def recorded(packed, made):
        ran.append([getattr(made, field) for field in fields])
        return real(packed, made)

    monkeypatch.setattr(fused, "_layer", recorded)
    eager = gradients(module, provider, parts)
    assert len(ran) == 1
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mine, other in zip(gradients(compiled, provider, parts), eager, strict=True):
        assert torch.equal(mine, other)
    assert len(ran) == 3  # in either operator
    assert ran[1:] == ran[:1] * 2
    monkeypatch.setattr(fused, "run", lambda *a: None)
    for mine, other in zip(eager, gradients(module, provider, parts), strict=True):
        assert (mine - other).float().norm() < 4e-3 * other.float().norm()


def checkpointed(function, *parts):
    return torch.utils.checkpoint.checkpoint(function, *parts, use_reentrant=False)


@pytest.fixture
def finished(monkeypatch):
    """How often second products have been computed."""
    kernels = fused._kernels()
    calls = []
    real = kernels.finish
    monkeypatch.setattr(kernels, "finish", lambda *a: calls.append(1) or real(*a))
    return calls


def test_a_recomputation_leaves_out_the_second_product(case, finished):
    module, provider, parts = case
    plain = gradients(module, provider, parts)
    assert len(finished) == 1
    again = gradients(lambda *parts: checkpointed(module, *parts), provider, parts)
    assert len(finished) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_recomputation_gives_what_is_saved_later(case, finished):
    module, provider, parts = case

    def squared(*parts):
        return module(*parts).square()

    plain = gradients(squared, provider, parts)
    again = gradients(lambda *parts: checkpointed(squared, *parts), provider, parts)
    assert len(finished) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_recomputation_decodes_for_backward_as_well(case, monkeypatch):
    from moe_qlora.kernels import dequantize, expert_mm

    module, provider, parts = case
    monkeypatch.setattr(expert_mm, "FEW", 0)
    decoded = []
    real = dequantize.decode
    monkeypatch.setattr(
        dequantize,
        "decode",
        lambda packed, *a, **k: decoded.append(packed.shape) or real(packed, *a, **k),
    )
    first, second = (E, 2 * INNER, H), (E, H, INNER)
    plain = gradients(module, provider, parts)
    assert decoded == [first, second, first]  # the second stack is still there for backward
    decoded.clear()
    again = gradients(lambda *parts: checkpointed(module, *parts), provider, parts)
    assert decoded == [first, second, first, second]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    decoded.clear()
    # The output is saved as well, so that the recomputation goes on to the second product.
    gradients(lambda *p: checkpointed(lambda *q: module(*q).square(), *p), provider, parts)
    assert decoded == [first, second, first, second]


def test_a_recomputation_asks_for_what_serves_twice(case, monkeypatch):
    from moe_qlora.kernels import expert_mm, moe_layer, quantized_mm

    module, provider, parts = case
    asked = []
    real = expert_mm.is_few

    def recorded(packed, count, dtype, *, back, twice=False):
        asked.append((packed.shape[1], back, twice))
        return real(packed, count, dtype, back=back, twice=twice)

    monkeypatch.setattr(moe_layer, "is_few", recorded)
    gradients(lambda *parts: checkpointed(module, *parts), provider, parts)
    forward = [(2 * INNER, False, False), (H, False, False)]
    again = [(2 * INNER, False, True), (H, False, False)]
    assert asked == [*forward, *again, (2 * INNER, True, False), (H, True, False)]
    # On Hopper's kernel codes are worth it for longer, unless decoding serves twice.
    monkeypatch.setattr(quantized_mm, "on_hopper", lambda *args, **kwargs: True)
    packed = parametrize.read_packed(module, NAMES[0])
    for rows, expected in ((256, (True, True)), (257, (True, False)), (513, (False, False))):
        found = [
            real(packed, rows * E, torch.bfloat16, back=False, twice=twice)
            for twice in (False, True)
        ]
        assert tuple(found) == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_for_any_number_of_tokens(case):
    module, provider, _ = case
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (11, 13, 400):
        x = torch.randn(tokens, H).half().requires_grad_()
        weights = torch.rand(tokens, K).half().requires_grad_()
        parts = x, torch.rand(tokens, E).topk(K, -1).indices, weights
        right = gradients(module, provider, parts)
        for mine, other in zip(gradients(compiled, provider, parts), right, strict=True):
            assert torch.equal(mine, other)


def two_adapters(provider):
    for name, terms in provider.all.items():
        provider.all[name] = (*terms, *terms)


def test_a_checkpoint_frees_factors_that_were_put_together(case, monkeypatch):
    module, provider, parts = case
    two_adapters(provider)
    made = []
    real = fused._one_term

    def recorded(*args):
        factors = real(*args)
        made.extend(weakref.ref(t) for t in factors[:2])
        return factors

    monkeypatch.setattr(fused, "_one_term", recorded)
    out = checkpointed(module, *parts)
    gc.collect()
    assert len(made) == 4 and not any(ref() is not None for ref in made)
    out.sum().backward()


def test_two_adapters_infer(case):
    module, provider, parts = case
    two_adapters(provider)
    right = module(*parts)
    with torch.inference_mode():
        assert torch.equal(module(*parts), right)


def test_scalings_are_numbers_of_one_kind(case):
    _, provider, _ = case
    term = provider.all["down_proj"][0]
    provider.all["down_proj"] = (replace(term, scaling=1),)
    whole = fused._one_term(provider.all["down_proj"], E, torch.float16, None)
    assert type(whole[2]) is float
    provider.all["down_proj"] *= 2
    whole = fused._one_term(provider.all["down_proj"], E, torch.float16, None)
    assert type(whole[2]) is float


def test_tensors_of_several_devices_are_refused(case, monkeypatch):
    module, provider, parts = case
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1 if self.is_meta else -1)
    term = provider.all["down_proj"][0]
    provider.all["down_proj"] = (replace(term, a=term.a.to("meta"), b=term.b.to("meta")),)
    with pytest.raises(ValueError, match="experts layer's tensors lie on several devices: cpu, m"):
        module(*parts)


def test_statistics_that_start_anywhere_are_copied(case, monkeypatch):
    module, provider, parts = case
    right = gradients(module, provider, parts)
    real = parametrize.read_packed
    off = []

    def shifted(module, name):
        packed = real(module, name)
        wide = torch.cat([packed.absmax[:1], packed.absmax])
        return replace(packed, absmax=wide[1:])

    monkeypatch.setattr(parametrize, "read_packed", shifted)
    layer = fused._layer
    monkeypatch.setattr(fused, "_layer", lambda *a: off.append(layer(*a)) or off[-1])
    mine = gradients(module, provider, parts)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
    assert all(s.absmax.data_ptr() % 16 == 0 for made in off for s in (made.first, made.second))


def test_factors_that_change_before_backward_are_an_error(case):
    module, provider, parts = case
    out = module(*parts)
    factor = provider.leaves()[1]
    with torch.no_grad():
        factor.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        out.sum().backward()


def test_factors_that_are_no_leaves_are_saved_as_any_tensor(case):
    module, provider, parts = case
    right = gradients(module, provider, parts)
    leaves, doubled = provider.leaves(), {}
    for name, (term,) in provider.all.items():
        doubled[name] = (replace(term, a=term.a * 1.0, b=term.b * 1.0),)
    provider.all = doubled
    out = module(*parts)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    mine = [out, *torch.autograd.grad(out, [parts[0], parts[2], *leaves], seed)]
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


def test_what_does_not_suit_is_left_to_the_projections(case, monkeypatch):
    module, provider, parts = case
    ran = []
    real = fused.run
    monkeypatch.setattr(fused, "run", lambda *a: ran.append(real(*a)) or ran[-1])
    right = module(*parts).detach()
    assert ran[-1] is not None

    module(*(t.float() if t.is_floating_point() else t for t in parts))
    assert ran[-1] is None  # float32 rows
    with torch.autocast("cpu", torch.float16):
        assert (module(*parts) - right).abs().max() < 0.01 * right.abs().max()
    assert ran[-1] is not None

    term = provider.all["down_proj"][0]
    provider.all["down_proj"] = (replace(term, dropout=nn.Dropout(0.5)),)
    module(*parts)
    assert ran[-1] is None  # dropout on what stands between the projections
    provider.all["down_proj"] = (replace(term, a=term.a.double(), b=term.b.double()),)
    assert fused._one_term(provider.all["down_proj"], E, torch.float16, None) is None
