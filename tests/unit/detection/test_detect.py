"""Detection on hand-made modules: remote-code style experts, and tensors that look like experts
and are none.

Each case is a module and the exact set of parameters that a QLoRA user wants packed. Names are
chosen to mislead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_qlora
from moe_qlora.testing import tiny_model

H, I, E = 48, 20, 6  # noqa: E741 - the intermediate size


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.05)


def route(logits: torch.Tensor, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    weights, index = torch.topk(logits.softmax(-1), k, dim=-1)
    return weights, index


def loop(
    x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, one: Callable
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out = out.index_add(0, token, one(x[token], e) * weights[token, slot, None])
    return out


def routed(x: torch.Tensor, router: Callable, one: Callable, k: int = 2) -> torch.Tensor:
    """Each token through `one(tokens, expert)` of the k experts that the router scores highest."""
    rows = x.reshape(-1, x.shape[-1])
    weights, index = route(router(rows), k)
    return loop(rows, weights, index, one).view(x.shape)


def gated(t: torch.Tensor, enter: torch.Tensor, leave: torch.Tensor, *biases) -> torch.Tensor:
    """One gated expert: `(2 I, H)` in, `(H, I)` out."""
    first, second = biases or (None, None)
    gate, up = F.linear(t, enter, first).chunk(2, -1)
    return F.linear(F.silu(gate) * up, leave, second)


# --- experts, in many styles


class FusedGated(nn.Module):
    """Everything in one module, a bare router, biases of every size beside it."""

    def __init__(self, hidden=H, inner=I, experts=E):
        super().__init__()
        self.kernel = P(experts, hidden)
        self.a = P(experts, 2 * inner, hidden)
        self.b = P(experts, hidden, inner)
        self.c = P(experts, 2 * inner)
        self.d = P(experts, hidden)

    def forward(self, x):
        def one(t, e):
            return gated(t, self.a[e], self.b[e], self.c[e], self.d[e])

        return routed(x, lambda rows: F.linear(rows, self.kernel), one)


class SeparateThree(nn.Module):
    """w1, w3, w2 in misleading order and orientation (E, in, out), Linear router."""

    def __init__(self):
        super().__init__()
        self.position_table = P(E, I, H)  # down
        self.q = P(E, H, I)  # up
        self.k = P(E, H, I)  # gate
        self.choose = nn.Linear(H, E, bias=False)

    def forward(self, x):
        def one(t, e):
            return (F.gelu(t @ self.k[e]) * (t @ self.q[e])) @ self.position_table[e]

        return routed(x, self.choose, one)


class NonGated(nn.Module):
    """Two projections whose shapes fit both ways round; einsum over all experts."""

    def __init__(self, flip: bool):
        super().__init__()
        self.flip = flip
        self.one = P(E, I, H)
        self.two = P(E, H, I)
        self.router = nn.Sequential(nn.Linear(H, 16), nn.Tanh(), nn.Linear(16, E))

    def forward(self, x):
        p = self.router(x).softmax(-1)
        up, down = (self.two, self.one) if self.flip else (self.one, self.two)
        if self.flip:
            y = torch.einsum("bth,ehi->btei", x, up)
            y = torch.einsum("btei,eih->bteh", y.relu(), down)
        else:
            y = torch.einsum("bth,eih->btei", x, up)
            y = torch.einsum("btei,ehi->bteh", y.relu(), down)
        return (y * p[..., None]).sum(-2)


class SquareNonGated(nn.Module):
    """Square matrices: only the forward tells rows from columns."""

    def __init__(self, flip: bool):
        super().__init__()
        self.flip = flip
        self.one = P(E, H, H)
        self.two = P(E, H, H)
        self.router = nn.Linear(H, E)

    def forward(self, x):
        def one(t, e):
            first, second = self.one[e], self.two[e]
            return (
                t.matmul(first).relu() @ second
                if self.flip
                else (t @ first.t()).relu() @ second.t()
            )

        return routed(x, self.router, one, 1)


class FourD(nn.Module):
    """Gate and up side by side in a dimension of their own: `(E, 2, I, H)`."""

    def __init__(self):
        super().__init__()
        self.enter = P(E, 2, I, H)
        self.leave = P(E, H, I)
        self.router = nn.Linear(H, E)

    def forward(self, x):
        def one(t, e):
            return F.linear(
                F.silu(F.linear(t, self.enter[e, 0])) * F.linear(t, self.enter[e, 1]), self.leave[e]
            )

        return routed(x, self.router, one)


class RankShare(nn.Module):
    """This rank holds E of 4 E experts; the code that skips the others cannot run alone."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(H, 4 * E, bias=False)
        self.w = P(E, 2 * I, H)
        self.v = P(E, H, I)

    def forward(self, x, group):
        raise RuntimeError("needs its process group")


class Opaque(nn.Module):
    """Plain gated experts whose forward cannot be run here at all."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w13 = P(E, H, 2 * I)
        self.w2 = P(E, I, H)

    def forward(self, x, kernel):
        return kernel.launch(x, self.w13, self.w2)


class DuplicateUse(nn.Module):
    """One bank used by two layers (tied)."""

    def __init__(self):
        super().__init__()
        self.first = FusedGated()
        self.second = FusedGated()
        self.second.a, self.second.b = self.first.a, self.first.b

    def forward(self, x):
        return self.second(self.first(x))


class LayersInOne(nn.Module):
    """All layers' experts in one 4-D parameter, and all routers in one 3-D parameter."""

    def __init__(self, wide=2):
        super().__init__()
        self.routers, self.wide = P(3, E, H), wide
        self.enter, self.leave = P(3, E, wide * I, H), P(3, E, H, I)

    def forward(self, x):
        for layer in range(3):

            def one(t, e, layer=layer):
                if self.wide == 1:
                    return F.linear(F.linear(t, self.enter[layer, e]).relu(), self.leave[layer, e])
                return gated(t, self.enter[layer, e], self.leave[layer, e])

            x = x + routed(x, partial(F.linear, weight=self.routers[layer]), one)
        return x


class LayersInOneApart(nn.Module):
    """All layers' experts in parameters of the root, and each router in its layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(H), "choose": nn.Linear(H, E)}) for _ in range(3)
        )
        self.enter, self.leave = P(3, E, 2 * I, H), P(3, E, H, I)

    def forward(self, x):
        for layer, block in enumerate(self.blocks):

            def one(t, e, layer=layer):
                return gated(t, self.enter[layer, e], self.leave[layer, e])

            x = x + routed(block["norm"](x), block["choose"], one)
        return x


class SoftSlots(nn.Module):
    """Soft-MoE: a router `(H, E, slots)`, and experts that all run on mixtures of tokens."""

    def __init__(self):
        super().__init__()
        self.phi = P(H, E, 2)
        self.enter, self.leave = P(E, H, I), P(E, I, H)

    def forward(self, x):
        scores = torch.einsum("bth,hes->btes", x, self.phi)
        slots = torch.einsum("bth,btes->besh", x, scores.softmax(1))
        inner = torch.einsum("besh,ehi->besi", slots, self.enter).relu()
        y = torch.einsum("besi,eih->besh", inner, self.leave)
        combine = scores.flatten(2).softmax(-1).view_as(scores)
        return torch.einsum("besh,btes->bth", y, combine)


# --- traps


class PerHead(nn.Module):
    """Per-head projections that chain (H -> d -> H), with a sigmoid gate over as many heads."""

    def __init__(self):
        super().__init__()
        self.experts_in = P(E, I, H)
        self.experts_out = P(E, H, I)
        self.gate = nn.Linear(H, E)

    def forward(self, x):
        y = torch.einsum("bth,eih->btei", x, self.experts_in).tanh()
        y = y * torch.sigmoid(self.gate(x))[..., None]
        return torch.einsum("btei,ehi->bth", y, self.experts_out)


class DepthDecoder(nn.Module):
    """Weights for each position in the depth, chosen by a loop. Biases look like a router."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = P(E, 2 * I, H)
        self.down_proj = P(E, H, I)
        self.bias_1, self.bias_2 = P(E, 2 * I), P(E, H)
        self.embedding = nn.Embedding(E, H)

    def forward(self, x):
        for position in range(E):
            gate, up = F.linear(x, self.gate_up_proj[position], self.bias_1[position]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down_proj[position], self.bias_2[position])
        return x + self.embedding.weight[0]


class DepthDecoderOpaque(DepthDecoder):
    def forward(self, x, cache):
        raise RuntimeError("needs a cache")


class LoraBank(nn.Module):
    """Adapters for E tasks on one Linear, chosen by a task router."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(H, H)
        self.lora_a = P(E, 4, H)
        self.lora_b = P(E, H, 4)
        self.task = nn.Linear(H, E)

    def forward(self, x):
        def one(t, e):
            return t @ self.lora_a[e].t() @ self.lora_b[e].t()

        return self.base(x) + routed(x, self.task, one)


class ExpertsWithLora(nn.Module):
    """Real experts with trained low-rank corrections beside them."""

    def __init__(self):
        super().__init__()
        self.u = P(E, 2 * I, H)
        self.d = P(E, H, I)
        self.u_a, self.u_b = P(E, 2, H), P(E, 2 * I, 2)
        self.router = nn.Linear(H, E)

    def forward(self, x):
        def one(t, e):
            gate, up = (F.linear(t, self.u[e]) + t @ self.u_a[e].t() @ self.u_b[e].t()).chunk(2, -1)
            return F.linear(F.silu(gate) * up, self.d[e])

        return routed(x, self.router, one)


class AttentionBesideExperts(nn.Module):
    """Per-head matrices that chain, with as many heads as the layer's MoE has experts."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Module()
        self.attention.k_up = P(E, H, 16)
        self.attention.v_up = P(E, 16, H)
        self.mlp = FusedGated()

    def forward(self, x, mask, positions, cache, other):
        raise RuntimeError("a whole layer")


class EarlyExit(nn.Module):
    """All layers in one weight, as JAX models have them, and a head that says how many to run."""

    def __init__(self):
        super().__init__()
        self.up, self.down = P(E, I, H), P(E, H, I)
        self.exit = nn.Linear(H, E)

    def layer(self, x, index):
        return x + F.linear(F.gelu(F.linear(x, self.up[index])), self.down[index])

    def forward(self, x):
        for index in range(E):
            x = self.layer(x, index)
        return x, self.exit(x).softmax(-1)


class MaskedExit(EarlyExit):
    """Layers after the one that the head chooses leave their token as it is."""

    def forward(self, x):
        depth = self.exit(x).argmax(-1, keepdim=True)
        for index in range(E):
            x = torch.where(index <= depth, self.layer(x, index), x)
        return x


class LanguageAdapters(nn.Module):
    """An adapter for each language, given by the caller, and a classifier of languages."""

    def __init__(self, inner=24):
        super().__init__()
        self.enter, self.leave = P(E, inner, H), P(E, H, inner)
        self.classify = nn.Linear(H, E)

    def forward(self, x, language):
        inner = torch.einsum("bth,btih->bti", x, self.enter[language]).relu()
        x = x + torch.einsum("bti,bthi->bth", inner, self.leave[language])
        return x, self.classify(x).softmax(-1)


class Wrap(nn.Module):
    """The block in layers of a model, as it is met in practice."""

    def __init__(self, block: type[nn.Module], *args: object):
        super().__init__()
        self.embed = nn.Embedding(31, H)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"norm": nn.LayerNorm(H), "x": block(*args)}) for _ in range(2)]
        )
        self.head = nn.Linear(H, 31, bias=False)


def checked_names(model: nn.Module) -> set[str]:
    """The names of the expert parameters, after checks that hold for every layout."""
    layout = moe_qlora.detect(model)
    names = {p.name for p in layout.experts}
    for r in layout.rejected:
        assert r.reason and r.name not in names
    others = {n for n, p in model.named_parameters() if p.dim() >= 3} - names
    assert others == {r.name for r in layout.rejected}
    for p in layout.experts:
        assert p.evidence and p.name == f"{p.module_name}.{p.parameter_name}".lstrip(".")
    return names


def test_layers_in_one_parameter_without_a_router_beside_it_say_what_to_do():
    reasons = {r.name: r.reason for r in moe_qlora.detect(LayersInOneApart()).rejected}
    assert reasons.keys() == {"enter", "leave"}
    for reason in reasons.values():
        assert f"nothing near it chooses among 3 or {E}" in reason
        assert f"if these are 3 layers of {E} experts, give each layer a parameter" in reason


@pytest.mark.parametrize("nested", [False, True])
def test_a_soft_mixture_is_named(nested):
    model = nn.ModuleList([SoftSlots(), SoftSlots()]) if nested else SoftSlots()
    layout = moe_qlora.detect(model)
    assert not layout.experts
    reasons = {r.name: r.reason for r in layout.rejected}
    prefixes = ("0.", "1.") if nested else ("",)
    assert reasons.keys() == {f"{p}{n}" for p in prefixes for n in ("phi", "enter", "leave")}
    for prefix in prefixes:
        router = reasons[f"{prefix}phi"]
        assert "the router of a soft mixture" in router
        assert f"2 slots for each of {E} experts (enter, leave)" in router
        for name in ("enter", "leave"):
            assert f"a soft mixture: phi ({H}x{E}x2) scores" in reasons[prefix + name]
            assert "not packed" in reasons[prefix + name]


# block, arguments, names relative to the block with their `transposed`
EXPERTS = [
    (FusedGated, (), {"a": False, "b": False}),
    (SeparateThree, (), {"position_table": True, "q": True, "k": True}),
    (NonGated, (False,), {"one": False, "two": False}),
    (NonGated, (True,), {"one": True, "two": True}),
    (SquareNonGated, (False,), {"one": False, "two": False}),
    (SquareNonGated, (True,), {"one": True, "two": True}),
    (FourD, (), {"enter": False, "leave": False}),
    (RankShare, (), {"w": False, "v": False}),
    (Opaque, (), {"w13": True, "w2": True}),
    (ExpertsWithLora, (), {"u": False, "d": False}),
    (LayersInOne, (), {"enter": False, "leave": False}),
    (LayersInOne, (1,), {"enter": False, "leave": False}),
    (AttentionBesideExperts, (), {"mlp.a": False, "mlp.b": False}),
]
TRAPS = [
    PerHead,
    DepthDecoder,
    DepthDecoderOpaque,
    LoraBank,
]


@pytest.mark.parametrize(
    ("block", "args", "expected"), EXPERTS, ids=lambda v: getattr(v, "__name__", None)
)
def test_experts_are_found(block, args, expected):
    model = Wrap(block, *args)
    names = {f"layers.{i}.x.{n}" for i in range(2) for n in expected}
    assert checked_names(model) == names
    layout = moe_qlora.detect(model)
    for p in layout.experts:
        assert p.transposed is expected[p.name.split(".x.", 1)[1]], (p.name, p.orientation_evidence)
        if p.transposed is not None:
            layers = p.shape[0] if block is LayersInOne else 1
            assert p.in_features * p.out_features * p.num_experts * layers == p.numel


@pytest.mark.parametrize("block", [FusedGated, NonGated, FourD, PerHead, LoraBank, DepthDecoder])
def test_meta_gives_the_same_answer(block):
    args = (True,) if block is NonGated else ()
    with torch.device("meta"):
        on_meta = Wrap(block, *args)
    strip = lambda layout: [(p.name, p.shape, p.role, p.transposed) for p in layout.experts]  # noqa: E731
    assert strip(moe_qlora.detect(on_meta)) == strip(moe_qlora.detect(Wrap(block, *args)))


def test_alone_without_layers():
    """The block itself, not in a model."""
    assert checked_names(FusedGated()) == {"a", "b"}
    assert checked_names(DepthDecoder()) == set()


def test_tied_weights_are_one_entry_with_aliases():
    layout = moe_qlora.detect(DuplicateUse())
    assert [p.name for p in layout.experts] == ["first.a", "first.b"]
    assert [p.aliases for p in layout.experts] == [("second.a",), ("second.b",)]


def test_roles_follow_the_forward():
    roles = {p.parameter_name: p.role for p in moe_qlora.detect(SeparateThree()).experts}
    assert roles == {"position_table": "down", "q": "up", "k": "gate"}
    assert {p.parameter_name: p.role for p in moe_qlora.detect(NonGated(True)).experts} == {
        "one": "down",
        "two": "up",
    }
    assert {p.parameter_name: p.role for p in moe_qlora.detect(NonGated(False)).experts} == {
        "one": "up",
        "two": "down",
    }


def test_the_model_is_neither_run_nor_changed():
    model = Wrap(FusedGated)
    calls = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *a: calls.append(a))
    before = copy.deepcopy(model.state_dict())
    moe_qlora.detect(model)
    assert not calls
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_linear_experts_are_reported_as_bitsandbytes_business():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(H, I), nn.Linear(I, H)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.ModuleList([*(Expert() for _ in range(E)), nn.Dropout()])
            self.sel = nn.Linear(H, E)

    layout = moe_qlora.detect(Wrap(Block))
    assert not layout.experts
    assert [(x.name, x.num_experts) for x in layout.linear_experts] == [
        ("layers.0.x.pool", E),
        ("layers.1.x.pool", E),
    ]
    assert layout.linear_experts[0].linear_names == ("a", "b")


def test_plain_linear_routers_are_reported():
    layout = moe_qlora.detect(Wrap(SeparateThree))
    assert [(r.name, r.num_choices, r.plain_linear) for r in layout.routers] == [
        ("layers.0.x.choose", E, True),
        ("layers.1.x.choose", E, True),
    ]
    assert not moe_qlora.detect(Wrap(FusedGated)).routers[0].plain_linear


def test_a_layer_list_is_not_an_expert_list():
    """As many layers as some Linear has outputs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(H, I), nn.Linear(I, H)) for _ in range(4)]
            )
            self.embed = nn.Embedding(4, H)

    assert not moe_qlora.detect(Model()).linear_experts


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "granitemoe"])
def test_a_model_of_no_expert_has_none(model_type):
    """A config.json that is damaged says so; loading then names the shapes that differ."""
    model = tiny_model(model_type, device="meta", num_local_experts=0)
    layout = moe_qlora.detect(model)
    assert not layout.experts
    assert {param.reason.partition(" (")[0] for param in layout.rejected} == {"holds no value"}


def test_integer_weights_are_rejected_with_their_dtype():
    model = FusedGated()
    model.a = nn.Parameter(torch.zeros(E, 2 * I, H, dtype=torch.uint8), requires_grad=False)
    layout = moe_qlora.detect(model)
    assert "uint8" in next(r.reason for r in layout.rejected if r.name == "a")


def test_a_dry_run_allocates_nothing_of_a_weight():
    """A block with 64 GiB of experts on meta is judged without touching their memory."""
    with torch.device("meta"):
        model = FusedGated(hidden=8192, inner=8192, experts=160)
    assert checked_names(model) == {"a", "b"}


# --- routing that ranks nothing, blocks kept in dicts, low-rank factors of other shapes


class ExpertChoice(nn.Module):
    """Each expert takes its best tokens, by sigmoid scores: nothing is ranked among experts."""

    def __init__(self):
        super().__init__()
        self.affinity = nn.Linear(H, E, bias=False)
        self.a, self.b = P(E, H, I), P(E, I, H)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, H)
        weights, index = self.affinity(x).sigmoid().t().topk(2, -1)
        y = torch.bmm(F.gelu(torch.bmm(x[index], self.a)), self.b) * weights[..., None]
        return torch.zeros_like(x).index_add(0, index.flatten(), y.flatten(0, 1)).view(shape)


class DictBlock(nn.Module):
    """Router and experts as entries of a ModuleDict; the forward cannot be run."""

    def __init__(self):
        super().__init__()
        experts = nn.Module()
        experts.a, experts.b = P(E, 2 * I, H), P(E, H, I)
        self.parts = nn.ModuleDict({"choose": nn.Linear(H, E), "pool": experts})

    def forward(self, x):
        raise RuntimeError("needs its process group")


class LinearPair(nn.Module):
    """Two matrices with nothing nonlinear between them, added to no base."""

    def __init__(self, inner):
        super().__init__()
        self.a, self.b = P(E, inner, H), P(E, H, inner)
        self.router = nn.Linear(H, E)

    def forward(self, x):
        return routed(x, self.router, lambda t, e: t @ self.a[e].t() @ self.b[e].t())


class LoraOfFeedForward(nn.Module):
    """Four factors of two matrices of a dense feed-forward layer, whose I is 2 H or 3 H."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(H, inner), nn.Linear(inner, H)
        self.ua, self.ub = P(E, 4, H), P(E, inner, 4)
        self.da, self.db = P(E, 4, inner), P(E, H, 4)
        self.router = nn.Linear(H, E)

    def forward(self, x):
        def one(t, e):
            h = F.gelu(self.up(t) + t @ self.ua[e].t() @ self.ub[e].t())
            return self.down(h) + h @ self.da[e].t() @ self.db[e].t()

        return routed(x, self.router, one)


class OpaqueLoraOfFeedForward(LoraOfFeedForward):
    def forward(self, x):
        raise RuntimeError("needs its process group")


class ByWeight(nn.Module):
    """Each token's matrices are picked out of the fused weights, and applied unweighted."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(H, E)
        self.a, self.b = P(E, I, H), P(E, H, I)

    def forward(self, x):
        best = self.score(x).argmax(-1)
        inner = torch.einsum("bth,btih->bti", x, self.a[best]).relu()
        return torch.einsum("bti,bthi->bth", inner, self.b[best])


class InPlace(ByWeight):
    """What an expert gives takes the place of its tokens: the next one reads the same tensor."""

    def forward(self, x):
        best = self.score(x).argmax(-1, keepdim=True)
        for e in range(E):
            y = F.linear(F.linear(x, self.a[e]).relu(), self.b[e])
            x = torch.where(best == e, y, x)
        return x


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (ByWeight, {"a", "b"}),
        (InPlace, {"a", "b"}),
        (ExpertChoice, {"a", "b"}),
        (DictBlock, {"parts.pool.a", "parts.pool.b"}),
        (partial(LinearPair, H // 4 + 1), {"a", "b"}),
    ],
)
def test_experts_of_unusual_routers_are_found(block, names):
    assert checked_names(Wrap(block)) == {f"layers.{i}.x.{n}" for i in range(2) for n in names}


@pytest.mark.parametrize(
    ("block", "args"),
    [
        *((block, ()) for block in TRAPS),
        (LinearPair, (H // 4,)),
        (LoraOfFeedForward, (2 * H,)),
        (OpaqueLoraOfFeedForward, (2 * H,)),
        (EarlyExit, ()),
        (MaskedExit, ()),
        (LanguageAdapters, ()),
    ],
)
def test_traps_are_left_alone(block, args):
    assert checked_names(Wrap(block, *args)) == set()


def test_images_are_tokens_too():
    """A block that wants (batch, height, width, channels)."""

    class Grid(SeparateThree):
        def forward(self, x):
            batch, height, width, channels = x.shape
            return super().forward(x.view(batch, height * width, channels)).view(x.shape)

    roles = {p.parameter_name: p.role for p in moe_qlora.detect(Grid()).experts}
    assert roles == {"position_table": "down", "q": "up", "k": "gate"}


def test_what_a_forward_prints_stays_inside(capsys):
    class Loud(FusedGated):
        def forward(self, x):
            print("hello")
            return super().forward(x)

    assert checked_names(Loud()) == {"a", "b"}
    assert capsys.readouterr().out == ""


def test_a_forward_that_exits_does_not_end_the_program():
    class Leaves(SeparateThree):
        def forward(self, x):
            raise SystemExit(3)

    assert checked_names(Leaves()) == {"position_table", "q", "k"}


@pytest.mark.parametrize("thing", [None, "model", FusedGated])
def test_what_is_no_module_is_named(thing):
    with pytest.raises(moe_qlora.DetectionError, match=type(thing).__name__):
        moe_qlora.detect(thing)
