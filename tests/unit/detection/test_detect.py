"""Detection on hand-made modules: experts in many styles, and tensors that look like experts.

Each case is a module and the exact set of parameters that a QLoRA user wants packed. Names are
chosen to mislead. No module has a forward: detection runs none.
"""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.integrations.moe import use_experts_implementation

import moe_qlora
from moe_qlora.layout import unwrapped_name
from moe_qlora.testing import tiny_model

H, I, E = 48, 20, 6  # noqa: E741 - the intermediate size
F, T = False, True


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.05)


def module(**parts: Any) -> nn.Module:
    owner = nn.Module()
    for name, part in parts.items():
        setattr(owner, name, part)
    return owner


def router(choices: int = E) -> nn.Linear:
    return nn.Linear(H, choices, bias=False)


def fused(**parts: Any) -> nn.Module:
    """Gate and up in one, down, and a bias for each expert."""
    return module(a=P(E, 2 * I, H), b=P(E, H, I), c=P(E, 2 * I), d=P(E, H), **parts)


def interface(first: nn.Parameter, second: nn.Parameter, **flags: bool) -> nn.Module:
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Any, index: Any, weights: Any) -> Any:
            return x

    made: Any = use_experts_implementation(**flags)(Experts)
    return made(PretrainedConfig())


def matrices(inside: int, outside: int) -> nn.Module:
    """One matrix for each expert, in a module that says its sizes."""
    return module(weight=P(E, outside, inside), input_size=inside, output_size=outside)


# A block, and its experts with role and `transposed`.
EXPERTS = {
    "fused": (lambda: fused(kernel=router()), {"a": ("gate_up", F), "b": ("down", F)}),
    "fused, stored (in, out)": (
        lambda: module(gate=router(), w13=P(E, H, 2 * I), w2=P(E, I, H)),
        {"w13": ("gate_up", T), "w2": ("down", T)},
    ),
    "fused, square": (
        lambda: module(x=P(E, 2 * H, H), y=P(E, H, H), z=router()),
        {"x": ("gate_up", F), "y": ("down", None)},
    ),
    "separate": (
        lambda: module(position_table=P(E, I, H), q=P(E, H, I), k=P(E, H, I), choose=router()),
        {"position_table": ("down", T), "q": ("gate", T), "k": ("up", T)},
    ),
    "a bare router beside": (
        lambda: module(x=module(a=P(E, 2 * I, H), b=P(E, H, I)), y=module(embedding=P(H, E))),
        {"x.a": ("gate_up", F), "x.b": ("down", F)},
    ),
    "a router of two layers": (
        lambda: fused(r=nn.Sequential(nn.Linear(H, 16), nn.Tanh(), nn.Linear(16, E))),
        {"a": ("gate_up", F), "b": ("down", F)},
    ),
    # So look per-head projections under a gate for each head, and layers under an early exit.
    "not gated": (
        lambda: module(x=P(E, I, H), y=P(E, H, I), z=router()),
        {"x": ("up", None), "y": ("down", None)},
    ),
    "a rank's share": (
        lambda: fused(router=router(4 * E)),
        {"a": ("gate_up", F), "b": ("down", F)},
    ),
    "a module for each matrix": (
        lambda: module(choose=router(), x=matrices(H, I), y=matrices(I, H)),
        {"x.weight": ("up", F), "y.weight": ("down", F)},
    ),
    "the interface, not gated": (
        lambda: module(
            gate=router(),
            pool=interface(P(E, I, H), P(E, H, I), has_gate=False, is_transposed=True),
        ),
        {"pool.second": ("up", T), "pool.first": ("down", T)},
    ),
}

# A block without experts, and a part of the reason for each of its parameters.
TRAPS = {
    "against its module": (
        lambda: module(
            gate=router(), pool=interface(P(E, 2 * I, H), P(E, H, I), is_transposed=True)
        ),
        "no single reading",
    ),
    "weights by position": (fused, "a bias for each slice"),
    "a bare router in one with biases": (lambda: fused(kernel=P(E, H)), "a bias for each slice"),
    "no router": (lambda: module(a=P(E, 2 * I, H), b=P(E, H, I)), "chooses among 6"),
    "a matrix alone": (lambda: module(a=P(E, 2 * I, H), r=router()), "chains with none"),
    "low-rank factors": (
        lambda: module(base=nn.Linear(H, 2 * H), a=P(E, 4, H), b=P(E, 2 * H, 4), task=router()),
        "task reads 48 features, and these matrices chain over 4",
    ),
    "a projection of attention": (
        lambda: module(attention=module(k=router(5 * E)), x=module(a=P(E, 2 * I, H), b=P(E, H, I))),
        "chooses among 6",
    ),
    "layers in one": (
        lambda: module(routers=P(3, E, H), enter=P(3, E, 2 * I, H), leave=P(3, E, H, I)),
        "",
    ),
}


class Wrap(nn.Module):
    """The block in layers of a model, as it is met in practice."""

    def __init__(self, block: Any):
        super().__init__()
        self.embed = nn.Embedding(31, H)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"norm": nn.LayerNorm(H), "x": block()}) for _ in range(2)]
        )
        self.head = nn.Linear(H, 31, bias=False)


def checked(model: nn.Module) -> Any:
    """The layout, after checks that hold for every one."""
    layout = moe_qlora.detect(model)
    names = {p.name for p in layout.experts}
    others = {n for n, p in model.named_parameters() if p.dim() >= 3} - names
    assert others == {r.name for r in layout.rejected}
    assert all(r.reason for r in layout.rejected)
    for p in layout.experts:
        assert p.evidence and p.name == f"{p.module_name}.{p.parameter_name}".lstrip(".")
        known = p.transposed is not None
        assert known == (p.in_features is not None)
        assert not known or p.in_features * p.out_features * p.num_experts == p.numel
    return layout


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_are_found(name, device):
    block, expected = EXPERTS[name]
    with torch.device(device):
        models = {"": block(), "layers.0.x.": Wrap(block)}
    for prefix, model in models.items():
        found = {p.name: (p.role, p.transposed) for p in checked(model)}
        assert {n: found[f"{prefix}{n}"] for n in expected} == expected
        assert len(found) == len(expected) * (2 if prefix else 1)


@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_left_alone(name):
    block, reason = TRAPS[name]
    for model in (block(), Wrap(block)):
        layout = checked(model)
        assert not layout.experts
        assert all(reason in r.reason for r in layout.rejected), layout.rejected


def test_linear_experts_are_reported_as_bitsandbytes_business():
    """And no list of as many layers as some matrix has rows."""

    def block() -> nn.Module:
        experts = [module(a=nn.Linear(H, I), b=nn.Linear(I, H)) for _ in range(E)]
        return module(pool=nn.ModuleList([*experts, nn.Dropout()]), sel=router())

    layout = moe_qlora.detect(Wrap(block))
    assert not layout.experts
    found = [(x.name, x.num_experts, x.linear_names) for x in layout.linear_experts]
    assert found == [(f"layers.{n}.x.pool", E, ("a", "b")) for n in range(2)]
    layers = [nn.Sequential(nn.Linear(H, I), nn.Linear(I, H)) for _ in range(4)]
    model = module(layers=nn.ModuleList(layers), embed=nn.Embedding(4, H))
    assert not moe_qlora.detect(model).linear_experts


def test_a_model_of_no_expert_has_none():
    """A config.json that is damaged says so; loading then names the shapes that differ."""
    layout = moe_qlora.detect(tiny_model("gpt_oss", device="meta", num_local_experts=0))
    assert not layout.experts
    assert {param.reason.partition(" (")[0] for param in layout.rejected} == {"holds no value"}


@pytest.mark.parametrize("thing", [None, "model", nn.Linear])
def test_what_is_no_module_is_named(thing):
    with pytest.raises(moe_qlora.DetectionError, match=type(thing).__name__):
        moe_qlora.detect(thing)


def facts(model: nn.Module) -> Any:
    layout = moe_qlora.detect(model)
    experts = [(e.name, e.role, e.transposed, e.orientation_evidence) for e in layout.experts]
    routers = [(router.name, router.num_choices) for router in layout.routers]
    return [[(unwrapped_name(name), *rest) for name, *rest in each] for each in (experts, routers)]


# A router of several layers with a choice of no expert; matrices of equal sides, either way round.
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("zaya", {}), ("gpt_oss", {"hidden_size": 64, "intermediate_size": 64}), ("dbrx", {})],
)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_adapters_change_nothing(model_type: str, sizes: dict[str, int], packed: bool) -> None:
    model = tiny_model(model_type, **sizes)
    expected = facts(model)
    if packed:
        moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    names = sorted({experts.name for experts in moe_qlora.detect(model).experts})
    config = LoraConfig(r=2, target_modules="all-linear", target_parameters=names)
    peft_model = moe_qlora.get_peft_model(model, config, unpacked_ok=True)
    assert facts(peft_model.get_base_model()) == expected
