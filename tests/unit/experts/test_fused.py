"""A whole module through a GPU's kernels, in Triton's interpreter: eager, compiled, refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from moe_qlora.experts import backend, fused
from moe_qlora.packing import parametrize
from tests.helpers.lora_layer import INNER, E, H, K, add_lora, layer_gradients, packed_host

pytestmark = pytest.mark.usefixtures("interpreted")


def parts_of(tokens):
    """Hidden states, choices and routing weights."""
    x = torch.randn(tokens, H).half().requires_grad_()
    weights = torch.rand(tokens, K).half().requires_grad_()
    return x, torch.rand(tokens, E).topk(K, -1).indices, weights


def all_equal(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def case(monkeypatch):
    """A packed module of transformers' in fp16 with LoRA, its provider, and x, index, weights."""
    torch.manual_seed(0)
    host = packed_host()
    provider = add_lora(host)
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    return host.experts, provider, parts_of(11)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_eager_equals_the_projections_and_compiled_equals_eager(case, monkeypatch):
    module, provider, parts = case
    made, real = [], fused.make_layer
    monkeypatch.setattr(fused, "make_layer", lambda *a: made.append(real(*a)) or made[-1])
    eager = layer_gradients(module, provider, parts)
    assert len(made) == 1
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all_equal(layer_gradients(compiled, provider, parts), eager)
    assert len(made) == 3  # in either operator
    for tokens in (5, 12):  # compiled first, so that nothing has run eagerly
        parts = parts_of(tokens)
        found = layer_gradients(compiled, provider, parts)
        eager = layer_gradients(module, provider, parts)
        assert all_equal(found, eager)
    monkeypatch.setattr(backend, "kernels_run", lambda device: False)
    for mine, other in zip(eager, layer_gradients(module, provider, parts), strict=True):
        assert (mine - other).float().norm() < 4e-3 * other.float().norm()


@pytest.mark.parametrize("fused", [True, False])
def test_operators_are_what_they_declare(case, fused, monkeypatch):
    """No input is changed, no output shares memory, and fake outputs are like the real ones."""
    module, _, parts = case
    monkeypatch.setattr(backend, "kernels_run", lambda device: fused)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with Calls() as calls:
        module(*parts).sum().backward()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    for operator, args in calls.made:
        torch.library.opcheck(operator, args, test_utils=checks)
    names = {str(operator).removesuffix(".default") for operator, _ in calls.made}
    wanted = ("layer", "layer_backward") if fused else ("projection", "product", "outer")
    assert names == {f"moe_qlora.experts_{name}" for name in wanted}


class Calls(TorchDispatchMode):
    """Notes each of the package's operators, and the arguments of its first call as leaves."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = [name for name, _ in self.made]
        if operator.namespace == "moe_qlora" and operator not in known:
            # Leaves, with a gradient where they can have one
            leaf = lambda t: t.detach().clone().requires_grad_(t.dtype == torch.float16)  # noqa: E731
            self.made.append((operator, tree_map_only(torch.Tensor, leaf, args)))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("needed", [False, True], ids=["left out", "saved later"])
def test_a_recomputation_leaves_out_a_second_product_that_none_needs(case, needed, monkeypatch):
    module, provider, parts = case
    kernels, products = fused.layer_kernels(), []
    real = kernels.down_forward
    monkeypatch.setattr(kernels, "down_forward", lambda *a: products.append(1) or real(*a))

    def call(*parts):
        return module(*parts).square() if needed else module(*parts)

    plain = layer_gradients(call, provider, parts)
    again = layer_gradients(partial(checkpoint, call, use_reentrant=False), provider, parts)
    assert len(products) == (3 if needed else 2)
    assert all_equal(plain, again)


def test_tensors_of_several_devices_are_refused(case, monkeypatch):
    module, provider, parts = case
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1 if self.is_meta else -1)
    term = provider.all["down_proj"][0]
    provider.all["down_proj"] = (replace(term, a=term.a.to("meta"), b=term.b.to("meta")),)
    with pytest.raises(ValueError, match="experts layer's tensors lie on several devices: cpu, m"):
        module(*parts)


def test_statistics_that_start_anywhere_are_copied(case, monkeypatch):
    module, provider, parts = case
    right = layer_gradients(module, provider, parts)
    real, off = backend.read_operand, []

    def shifted(module, name):
        packed = real(module, name)
        return replace(packed, absmax=torch.cat([packed.absmax[:1], packed.absmax])[1:])

    monkeypatch.setattr(backend, "read_operand", shifted)
    layer = fused.make_layer
    monkeypatch.setattr(fused, "make_layer", lambda *a: off.append(layer(*a)) or off[-1])
    assert all_equal(layer_gradients(module, provider, parts), right)
    assert all(s.absmax.data_ptr() % 16 == 0 for made in off for s in (made.first, made.second))


def test_factors_that_change_before_backward_are_an_error(case):
    module, provider, parts = case
    out = module(*parts)
    factor = provider.leaves()[1]
    with torch.no_grad():
        factor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def choice(module, x):
    return backend.choose_backend(module, backend.read_call(module, x))


def test_each_reason_against_the_fused_layer(case, monkeypatch):
    module, provider, (x, index, weights) = case
    assert choice(module, x) == backend.FUSED and "suit its kernels" in backend.FUSED.reason
    right = module(x, index, weights).detach()
    refused = choice(module, x.float())
    assert refused.name == "reference loop"  # on the CPU
    assert refused.reason == "the activations are torch.float32, not bfloat16 or float16"
    with torch.autocast("cpu", torch.float16):
        assert choice(module, x.float()) == backend.FUSED
        single = module(x.float(), index, weights.float())
        assert (single - right).abs().max() < 0.01 * right.abs().max()
    (term,) = own = provider.all["down_proj"]
    wide = replace(term, a=torch.zeros(E * 160, INNER), b=torch.zeros(H, E * 160))
    double = replace(term, a=term.a.double(), b=term.b.double())
    for terms, reason in (
        ((replace(term, dropout=nn.Dropout(0.5)),), "dropout stands before the LoRA of down_proj"),
        ((double,), "LoRA of down_proj is torch.float64, the activations are torch.float16"),
        ((wide,), "the LoRA of down_proj is of rank 160, over 128"),
        ((term, term), "2 adapters of down_proj are active at a time"),
    ):
        provider.all["down_proj"] = terms
        assert reason in choice(module, x).reason
    with torch.inference_mode():
        two = module(x, index, weights)
        provider.all["down_proj"] = (replace(term, scaling=2 * term.scaling),)
        assert (two - module(x, index, weights)).abs().max() < 0.01 * two.abs().max()
    provider.all["down_proj"] = own
    assert choice(module, x[:0]).reason == "there are no tokens"
    module.has_bias = True
    biases = [nn.Parameter(torch.zeros(E, 1), requires_grad=False) for _ in range(2)]
    module.gate_up_proj_bias, module.down_proj_bias = biases
    assert choice(module, x) == backend.FUSED
    biases[1].requires_grad_()
    assert choice(module, x).reason == "down_proj_bias is trained"
    module.has_bias, module.has_post_expert_norm = False, True
    assert "a norm stands between" in choice(module, x).reason
    module.has_post_expert_norm = False
    monkeypatch.setattr(backend, "kernels_run", lambda device: False)
    assert "need CUDA of compute capability 8.0 and Triton, not cpu" in choice(module, x).reason
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    parametrize.detach(module, "down_proj")
    assert choice(module, x).reason == "down_proj is not packed"
    parametrize.detach(module, "gate_up_proj")
    assert choice(module, x) == backend.UNPACKED
