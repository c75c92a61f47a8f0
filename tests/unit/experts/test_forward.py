"""The experts forward against plain products of decoded weights: outputs, every gradient."""

from dataclasses import dataclass
from functools import partial

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation

from moe_qlora.experts import forward as experts
from moe_qlora.experts import operands, projection
from moe_qlora.packing import codec, decoders, parametrize
from moe_qlora.packing.settings import CodecSettings
from tests.helpers import lora_layer

H, I, E, K, T = 24, 20, 5, 2, 13  # noqa: E741 - the intermediate size


@dataclass
class Style:
    """One layout of transformers' experts classes."""

    transposed: bool = False
    bias: bool = False
    gate: bool = True
    interleaved: bool = False
    norm: bool = False
    clamped: bool = False
    shifted: bool = False  # the norm has a bias, which makes something of nothing


STYLES = {
    "concatenated": Style(),
    "transposed": Style(transposed=True),
    "biased": Style(bias=True),
    "interleaved": Style(transposed=True, bias=True, interleaved=True, clamped=True),
    "non-gated": Style(gate=False),
    "non-gated-transposed-biased": Style(gate=False, transposed=True, bias=True),
    "normed-biased": Style(norm=True, bias=True, transposed=True),
    "normed-shifted": Style(norm=True, shifted=True),
}


def make(style: Style, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """An experts module as transformers writes them, plain."""

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            g = torch.Generator().manual_seed(seed)

            def parameter(*shape):
                return nn.Parameter((torch.randn(*shape, generator=g) * 0.2).to(dtype))

            first, width = names(style)[0], 2 * I if style.gate else I
            self.num_experts = E
            for name, out, into in ((first, width, H), ("down_proj", H, I)):
                shape = (into, out) if style.transposed else (out, into)
                setattr(self, name, parameter(E, *shape))
                if style.bias:
                    setattr(self, f"{name}_bias", parameter(E, out))
            if style.norm:
                norm = nn.LayerNorm if style.shifted else nn.RMSNorm
                self.post_expert_norm = norm(H, dtype=dtype)
            if style.shifted:
                self.post_expert_norm.bias.data += 0.5
            self.act_fn = F.silu if style.gate else lambda x: F.relu(x).square()
            self.alpha = nn.Parameter(torch.tensor(1.3, dtype=dtype))

        if style.clamped:

            def _apply_gate(self, gate_up):
                gate, up = gate_up[..., ::2].clamp(max=0.4), gate_up[..., 1::2].clamp(-0.4, 0.4)
                return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the class's own forward must not run")

    decorated = use_experts_implementation(
        Experts,
        is_transposed=style.transposed,
        has_bias=style.bias,
        has_gate=style.gate,
        is_concatenated=not style.interleaved,
        has_post_expert_norm=style.norm,
    )
    return decorated(PreTrainedConfig(experts_implementation="eager"))


def names(style: Style) -> tuple[str, str]:
    return ("gate_up_proj" if style.gate else "up_proj"), "down_proj"


def pack(
    module: nn.Module, style: Style, which=(0, 1), kind: str = "nf4", compute=None
) -> nn.Module:
    settings = CodecSettings(kind, kind != "int8", torch.uint8, compute_dtype=compute)
    for index in which:
        name = names(style)[index]
        parametrize.attach(module, name, codec.pack(getattr(module, name).data, settings))
    wrapper = nn.Module()
    wrapper.block = module
    assert experts.activate(wrapper, ["block"]) == ()
    return module


class Provider(lora_layer.Provider):
    """LoRA terms for both projections of a style, as trainable leaves."""

    def __init__(self, style: Style, ranks=((3, 2), (4,)), dropout=0.0, dtype=torch.float32):
        sizes = (2 * I if style.gate else I, H), (H, I)
        torch.manual_seed(1)
        named = dict(zip(names(style), sizes, strict=True))
        super().__init__(named, E, dtype, ranks, 0.3, dropout)


def routing(dtype=torch.float32, tokens=T, empty=()):
    g = torch.Generator().manual_seed(3)
    allowed = torch.tensor([e for e in range(E) if e not in empty])
    index = torch.stack(
        [allowed[torch.randperm(len(allowed), generator=g)[:K]] for _ in range(tokens)]
    )
    weights = torch.rand(tokens, K, generator=g).to(dtype)
    x = torch.randn(tokens, H, generator=g).to(dtype)
    return x.requires_grad_(), index, weights.requires_grad_()


def slow(module, style: Style, provider, x, index, weights):
    """Decoded W + s B A, all experts for all tokens."""
    y = x
    for name in names(style):
        weight = getattr(module, name).detach().to(x.dtype)
        weight = weight.mT if style.transposed else weight  # (E, out, in)
        for term in provider.active_lora(name) if provider else ():
            a, b = term.a.to(x.dtype), term.b.to(x.dtype)
            delta = torch.einsum("ore,eri->eoi", b.view(len(b), -1, E), a.view(E, -1, a.shape[1]))
            weight = weight + delta * term.scaling
        y = y @ weight.mT
        if style.bias:
            y = y + getattr(module, f"{name}_bias")[:, None]
        if name != "down_proj":
            y = module._apply_gate(y) if style.gate else module.act_fn(y)
    if style.norm:
        y = module.post_expert_norm(y)
    chosen = y[index, torch.arange(len(x), device=x.device)[:, None]]  # (T, k, out)
    return (chosen * weights[..., None]).sum(1)


def gradients(out, tensors):
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return torch.autograd.grad(out, tensors, seed, allow_unused=True)


def close(ours, theirs, tolerance=1e-5):
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12)
    assert error < tolerance, float(error)


def compare(module, style, provider, x, index, weights, tolerance=1e-5):
    if provider is not None:
        operands.set_lora_source(module, provider)
    leaves = [x, weights, *(provider.leaves() if provider else [])]
    leaves += [p for p in module.parameters() if p.requires_grad]
    ours = module(x, index, weights)
    theirs = slow(module, style, provider, x, index, weights)
    close(ours, theirs, tolerance)
    for pair in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        if any(grad is None for grad in pair):
            assert not any(grad is not None and grad.any() for grad in pair)
        else:
            close(*pair, tolerance)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
@pytest.mark.parametrize("lora", ["both", "first", "down", "none"])
def test_equals_plain_products(style, lora):
    module = pack(make(style), style)
    ranks = {"both": ((3, 2), (4,)), "first": ((3,), ()), "down": ((), (1,)), "none": None}[lora]
    provider = Provider(style, ranks) if ranks else None
    compare(module, style, provider, *routing())


@pytest.mark.parametrize(("kind", "which"), [("nf4", (0,)), ("fp4", (1,)), ("int8", (1,))])
def test_one_projection_packed_the_other_plain_and_trained(kind, which):
    style = STYLES["biased"]
    module = pack(make(style), style, which, kind=kind)
    plain = names(style)[1 - which[0]]
    assert getattr(module, plain).requires_grad
    parts = routing()
    (grad,) = torch.autograd.grad(module(*parts).sum(), [getattr(module, plain)])
    assert grad.abs().sum() > 0
    module.requires_grad_(False)
    compare(module, style, Provider(style), *parts)


@pytest.mark.parametrize("case", [{"tokens": 1}, {"empty": (0, 1, 2)}, {"tokens": 101}])
@pytest.mark.parametrize("style", ["interleaved", "normed-biased", "normed-shifted"])
def test_odd_routings(case, style):
    style = STYLES[style]
    module = pack(make(style), style)
    compare(module, style, Provider(style), *routing(**case))
    x = torch.zeros(0, H, requires_grad=True)
    out = module(x, torch.zeros(0, K, dtype=torch.long), torch.zeros(0, K))
    assert out.shape == (0, H)
    out.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant):
    style = STYLES["concatenated"]
    module = pack(make(style), style)
    provider = Provider(style, dropout=0.3)
    operands.set_lora_source(module, provider)
    parts = routing()
    leaves, found = [parts[0], *provider.leaves()], []
    for run in (module, partial(checkpoint, module, use_reentrant=reentrant)):
        torch.manual_seed(5)
        run(*parts).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("count", [4, 64])
def test_kept_bytes_follow_the_formula_and_do_not_depend_on_experts(count, monkeypatch):
    monkeypatch.setitem(globals(), "E", count)
    style = STYLES["concatenated"]
    module = pack(make(style), style)
    provider = Provider(style)
    operands.set_lora_source(module, provider)
    parts = routing(tokens=64)
    known = {t.untyped_storage().data_ptr() for t in (*parts, *provider.leaves())}
    known |= {p.untyped_storage().data_ptr() for p in module.parameters()}
    held = {}

    def hold(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        out = module(*parts)
    known.add(out.untyped_storage().data_ptr())
    # pre-activations, activations, outputs to be weighted, LoRA's inputs and inner products
    rows, each = 64 * K, 2 * I + I + H + 1 + H + 2 * 9
    kept = sum(n for pointer, n in held.items() if pointer not in known)
    assert kept <= rows * each * 4 + 5 * 8 * rows + 4 * (count + 1)


def test_decodes_only_experts_that_have_tokens(monkeypatch):
    seen, style = [], STYLES["concatenated"]

    def watch(stack, start, stop, **kwargs):
        seen.append(start)
        return codec.unpack_range(stack, start, stop, **kwargs)

    monkeypatch.setattr(projection, "unpack_range", watch)
    # Never by a read, which decodes the whole stack
    monkeypatch.setattr(decoders.Decoder, "forward", lambda *args: 1 / 0)
    module = pack(make(style), style)
    x, _, weights = routing()
    module(x, torch.tensor([[1, 3]]).expand(T, K), weights).sum().backward()
    assert sorted(set(seen)) == [1, 3]


# Where exactness is easily lost: dtypes, frozen factors, one module twice.


def adapted(style, dtype=torch.float32, compute=None):
    """A packed module with one adapter on each projection."""
    module = pack(make(style, dtype), style, compute=compute)
    provider = Provider(style, ranks=((3,), (3,)))
    operands.set_lora_source(module, provider)
    return module, provider


def test_a_factor_that_is_frozen_gets_no_gradient():
    module, provider = adapted(STYLES["non-gated"])
    frozen, trained, *_ = provider.leaves()
    frozen.requires_grad_(False)
    module(*routing()).sum().backward()
    assert frozen.grad is None and trained.grad is not None


def test_fp32_adapters_over_a_bf16_layer_stay_fp32():
    style = STYLES["non-gated"]
    module, provider = adapted(style, torch.bfloat16)
    x, index, weights = routing(torch.bfloat16, tokens=33)
    out = module(x, index, weights)
    assert out.dtype == torch.bfloat16
    close(out, slow(module, style, provider, x.double(), index, weights.double()), 0.02)
    grads = torch.autograd.grad(out.sum(), provider.leaves())
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_adapters_read_inputs_that_are_not_rounded_to_the_compute_dtype():
    """A's rows sum to zero: of inputs near 1, which bf16 rounds to 1, nothing would be left."""
    style = STYLES["non-gated"]
    module, provider = adapted(style, compute=torch.bfloat16)
    factors = provider.leaves()
    factors[0].data -= factors[0].data.mean(1, keepdim=True)
    x, index, weights = routing(tokens=33)
    x = (1 + x.detach() / 2**12).requires_grad_()
    exact = slow(module, style, provider, x.double(), index, weights.double())
    mine = torch.autograd.grad(module(x, index, weights).sum(), factors)
    for ours, theirs in zip(mine, torch.autograd.grad(exact.sum(), factors), strict=True):
        close(ours, theirs, 0.02)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_computes_in_the_dtype_that_linear4bit_computes_in(compute, autocast, monkeypatch):
    """One expert equals two Linear4bit of the same weights; another dtype is 4e-3 off."""
    for name, size in {"E": 1, "H": 64, "I": 64, "K": 1}.items():
        monkeypatch.setitem(globals(), name, size)
    style, layers = STYLES["non-gated"], []
    module = make(style)
    module.act_fn = F.silu
    for name in names(style):
        packed = codec.pack(getattr(module, name).data, CodecSettings("nf4", compute_dtype=compute))
        parametrize.attach(module, name, packed)
        layer = bitsandbytes.nn.Linear4bit(64, 64, False, compute, False, "nf4")
        weight = codec.unpack(packed)[0]
        layer.weight = bitsandbytes.nn.Params4bit(weight, False, None, 64, False, "nf4")
        layers.append(layer.to("cpu"))
    module = pack(module, style, ())
    x = torch.randn(40, 64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine = module(x, torch.zeros(40, 1, dtype=torch.long), torch.ones(40, 1))
        theirs = layers[1](F.silu(layers[0](x)))
    assert mine.dtype == theirs.dtype == torch.float32
    close(mine, theirs, 5e-4)
