"""A whole module through a GPU's kernels, in Triton's interpreter: eager, compiled, refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_qlora.experts import backend, forward, fused
from moe_qlora.experts.operands import record_of
from moe_qlora.packing import parametrize
from tests.helpers.late_streams import replace_launches
from tests.helpers.lora_layer import INNER, E, H, K, add_lora, layer_gradients, packed_host

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")
T = 11


@pytest.fixture
def case(monkeypatch):
    """A packed module of transformers' in fp16 with LoRA, its provider, and x, index, weights."""
    torch.manual_seed(0)
    host = packed_host()
    provider = add_lora(host)
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    x = torch.randn(T, H).half().requires_grad_()
    weights = torch.rand(T, K).half().requires_grad_()
    return host.experts, provider, (x, torch.rand(T, E).topk(K, -1).indices, weights)


def refuse_kernels(module, monkeypatch):
    """As where the kernels do not run, which is decided anew."""
    monkeypatch.setattr(backend, "kernels_run", lambda device: False)
    record_of(module).backends.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_eager_equals_the_projections_and_compiled_equals_eager(case, monkeypatch):
    module, provider, parts = case
    ran = []
    real = fused.make_layer

    def recorded(inputs):
        ran.append((tuple(inputs.gate), inputs.transposed, inputs.x.dtype))
        return real(inputs)

    monkeypatch.setattr(fused, "make_layer", recorded)
    eager = layer_gradients(module, provider, parts)
    assert len(ran) == 1
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mine, other in zip(layer_gradients(compiled, provider, parts), eager, strict=True):
        assert torch.equal(mine, other)
    assert len(ran) == 3  # in either operator
    assert ran[1:] == ran[:1] * 2
    refuse_kernels(module, monkeypatch)
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
            self.made.append((operator, tree_map_only(torch.Tensor, detached, args)))
        return operator(*args, **(kwargs or {}))


def detached(tensor):
    """A copy that is a leaf, with a gradient where it can have one."""
    return tensor.detach().clone().requires_grad_(tensor.dtype == torch.float16)


def checkpointed(function, *parts):
    return torch.utils.checkpoint.checkpoint(function, *parts, use_reentrant=False)


@pytest.mark.parametrize("needed", [False, True], ids=["left out", "saved later"])
def test_a_recomputation_leaves_out_a_second_product_that_none_needs(case, needed, monkeypatch):
    module, provider, parts = case
    kernels, products = fused.layer_kernels(), []
    real = kernels.down_forward
    monkeypatch.setattr(kernels, "down_forward", lambda *a: products.append(1) or real(*a))

    def call(*parts):
        return module(*parts).square() if needed else module(*parts)

    plain = layer_gradients(call, provider, parts)
    again = layer_gradients(lambda *parts: checkpointed(call, *parts), provider, parts)
    assert len(products) == (3 if needed else 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_for_any_number_of_tokens(case):
    module, provider, _ = case
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (5, 7, 12):
        x = torch.randn(tokens, H).half().requires_grad_()
        weights = torch.rand(tokens, K).half().requires_grad_()
        parts = x, torch.rand(tokens, E).topk(K, -1).indices, weights
        found = layer_gradients(compiled, provider, parts)  # first, so that nothing has run eagerly
        for mine, other in zip(found, layer_gradients(module, provider, parts), strict=True):
            assert torch.equal(mine, other)


def test_two_adapters_infer(case):
    module, provider, parts = case
    provider.all = {name: (*terms, *terms) for name, terms in provider.all.items()}
    right = module(*parts)
    with torch.inference_mode():
        assert torch.equal(module(*parts), right)


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
    real = backend.read_operand
    off = []

    def shifted(module, name):
        packed = real(module, name)
        wide = torch.cat([packed.absmax[:1], packed.absmax])
        return replace(packed, absmax=wide[1:])

    monkeypatch.setattr(backend, "read_operand", shifted)
    layer = fused.make_layer
    monkeypatch.setattr(fused, "make_layer", lambda *a: off.append(layer(*a)) or off[-1])
    mine = layer_gradients(module, provider, parts)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
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


def test_what_does_not_suit_is_left_to_the_projections(case):
    module, provider, parts = case
    assert choice(module, parts[0]) == backend.FUSED
    assert "suit its kernels" in backend.FUSED.reason
    right = module(*parts).detach()

    refused = choice(module, parts[0].float())
    assert refused.name == "reference loop"  # on the CPU
    assert refused.reason == "the activations are torch.float32, not bfloat16 or float16"
    with torch.autocast("cpu", torch.float16):
        assert choice(module, parts[0].float()) == backend.FUSED
        single = (t.float() if t.is_floating_point() else t for t in parts)
        assert (module(*single) - right).abs().max() < 0.01 * right.abs().max()

    term = provider.all["down_proj"][0]
    for change, reason in (
        ({"dropout": nn.Dropout(0.5)}, "dropout stands before the LoRA of down_proj"),
        (
            {"a": term.a.double(), "b": term.b.double()},
            "the LoRA of down_proj is torch.float64, the activations are torch.float16",
        ),
        (
            {"a": torch.zeros(E * 160, INNER), "b": torch.zeros(H, E * 160)},
            "ranks of the adapters of down_proj sum up to 160, over 128",
        ),
    ):
        provider.all["down_proj"] = (replace(term, **change),)
        assert choice(module, parts[0]).reason == reason
    provider.all["down_proj"] = (term, replace(term, scaling=2.0))
    assert "scaled by 0.5 and 2.0" in choice(module, parts[0]).reason


def test_each_reason_against_the_fused_layer(case, monkeypatch):
    module, _, (x, *_) = case
    assert choice(module, x[:0]).reason == "there are no tokens"
    monkeypatch.setattr(module, "has_bias", True)
    biases = [nn.Parameter(torch.zeros(E, 1), requires_grad=False) for _ in range(2)]
    module.gate_up_proj_bias, module.down_proj_bias = biases
    assert choice(module, x) == backend.FUSED
    biases[1].requires_grad_()
    assert choice(module, x).reason == "down_proj_bias is trained"
    monkeypatch.setattr(module, "has_bias", False)
    monkeypatch.setattr(module, "has_post_expert_norm", True, raising=False)
    record_of(module).backends.clear()
    assert "a norm stands between" in choice(module, x).reason
    monkeypatch.undo()
    record_of(module).backends.clear()
    assert "need CUDA of compute capability 8.0 and Triton, not cpu" in choice(module, x).reason
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    record_of(module).backends.clear()
    parametrize.detach(module, "down_proj")
    assert choice(module, x).reason == "down_proj is not packed"
    parametrize.detach(module, "gate_up_proj")
    assert choice(module, x) == backend.UNPACKED


@pytest.mark.parametrize("way", ["on codes", "dequantized", "in slices"])
def test_few_frames_lie_between_the_forward_and_a_launch(case, way, monkeypatch):
    """Of this package, both ends included; torch's own, as of autograd, are not counted."""
    from moe_qlora.kernels import table, workspace

    module, _, parts = case
    if way != "on codes":
        monkeypatch.setattr(table, "KERNELS", [k for k in table.kernels() if not k.on_codes])
    found = []

    def noted(*args, **options):
        frame, names = sys._getframe(1), ["experts_forward"]
        while frame.f_code is not forward.experts_forward.__code__:
            if "moe_qlora" in frame.f_globals["__name__"]:
                names.insert(1, frame.f_code.co_name)
            frame = frame.f_back
        found.append(names)

    replace_launches(monkeypatch, noted)
    workspace.set_workspace_cap(1 if way == "in slices" else None)
    try:
        module(*parts)
    finally:
        workspace.set_workspace_cap(None)
    assert len(found) > 6
    assert max(map(len, found)) <= 5, max(found, key=len)
