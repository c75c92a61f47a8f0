"""Every registry file against transformers, and the detector against every registry file."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
import transformers
from representatives import REPRESENTATIVES
from torch import nn
from transformers import initialization
from upstream import skip_llama4, skip_renamed

import moe_qlora
from moe_qlora import registry
from moe_qlora.errors import ConfigError
from moe_qlora.layout import ExpertParam, ExpertsModule, ModelLayout, Router, name_pattern
from moe_qlora.testing import model_class, registry_families, tiny_inputs, tiny_model

TYPES = registry_families()

NO_TEXT_FORWARD = {
    "dots3_note_vision_encoder": "takes image patches only",
    "qwen3_omni_moe": "has no forward of its own; its thinker and talker have their own files",
}


pytestmark = pytest.mark.filterwarnings("ignore")


def meta_model(entry):
    """Build a model of the published sizes."""
    config = transformers.CONFIG_MAPPING[entry.model_type](**entry.published_config)
    # On meta no initialization has an effect, but each takes its time.
    with torch.device("meta"), initialization.no_init_weights():
        model = model_class(entry.model_type)._from_config(config)
    model.tie_weights()
    return model


def filled(pattern: str, numbers: tuple[int, ...]) -> str:
    """Return the pattern with its `*` replaced, in order: ("a.*.b", (3,)) gives "a.3.b"."""
    rest = iter(numbers)
    return ".".join(str(next(rest)) if part == "*" else part for part in pattern.split("."))


def indices(text: str) -> Iterator[tuple[int, ...]]:
    """Yield (0,), (1,), (2,), (5,) for "0-2,5", and (0, 1), (0, 2) for "0.1,0.2"."""
    for part in filter(None, text.split(",")):
        if "." in part:
            yield tuple(int(number) for number in part.split("."))
            continue
        first, _, last = part.partition("-")
        yield from ((number,) for number in range(int(first), int(last or first) + 1))


def instances(item: dict[str, Any]) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Return each weight's group (its shape and number of experts) and its numbers at `*`."""
    pairs = [(group, at) for group in item["groups"] for at in indices(group["at"])]
    assert len(pairs) == item["count"]
    return pairs


def expected_layout(entry: registry.RegistryEntry, sizes: str) -> ModelLayout:
    """Return the layout that the registry expects, at its "published" or "tiny" sizes."""
    placed = []
    towers: list[str] = []
    for order, item in enumerate(entry.experts):
        tower = item["pattern"].partition("*")[0]
        if tower not in towers:
            towers.append(tower)
        for group, at in instances(item[sizes]):
            placed.append(((towers.index(tower), at, order), expected_expert(item, group, at)))
    # The model's own order: layer by layer, and within a layer as the file lists them.
    experts = [expert for _, expert in sorted(placed, key=lambda item: item[0])]
    modules = expected_modules(entry, experts)
    routers = tuple(dict.fromkeys(module.router for module in modules if module.router))
    return ModelLayout(experts=tuple(experts), modules=modules, routers=routers)


def expected_expert(
    item: dict[str, Any], group: dict[str, Any], numbers: tuple[int, ...]
) -> ExpertParam:
    name = filled(item["pattern"], numbers)
    module_name, _, parameter_name = name.rpartition(".")
    rows, columns = group["shape"][-2:]
    if item["packed_rows"]:
        rows //= group["experts"]
    first, second = (columns, rows) if item["transposed"] else (rows, columns)
    known = item["transposed"] is not None
    return ExpertParam(
        name=name,
        module_name=module_name,
        parameter_name=parameter_name,
        shape=tuple(group["shape"]),
        num_experts=group["experts"],
        in_features=second if known else None,
        out_features=first if known else None,
        transposed=item["transposed"],
        role=item["role"],
        dtype="bfloat16",
        nbytes=prod(group["shape"]) * 2,
        evidence="",
        aliases=tuple(filled(alias, numbers) for alias in item["aliases"]),
    )


def expected_modules(
    entry: registry.RegistryEntry, experts: list[ExpertParam]
) -> tuple[ExpertsModule, ...]:
    by_module: dict[str, list[ExpertParam]] = {}
    for expert in experts:
        by_module.setdefault(expert.module_name, []).append(expert)
    items = {item["pattern"]: item for item in entry.experts}
    modules = []
    for name, owned in by_module.items():
        item = items[owned[0].pattern]
        numbers = tuple(int(part) for part in name.split(".") if part.isdigit())
        count = max(expert.num_experts for expert in owned)
        router = None
        if item["router"] is not None and item["router"]["weight"] is not None:
            name_of_router = filled(item["router"]["weight"], numbers)
            router = Router(name_of_router, count, item["router"]["plain_linear"])
        modules.append(
            ExpertsModule(
                name=name,
                class_name=item["experts_class"],
                num_experts=count,
                parameters=tuple(owned),
                router=router,
                dispatches=item["dispatches"],
                bias_names=tuple(item["biases"]),
            )
        )
    return tuple(modules)


def compare(found: ModelLayout, expected: ModelLayout) -> None:
    got = {param.name: param for param in found}
    want = {param.name: param for param in expected}
    assert list(got) == list(want), [r for r in found.rejected if r.name in want]
    for name, param in want.items():
        assert set(got[name].aliases) == set(param.aliases), name
        for field in ("shape", "num_experts", "role", "transposed", "in_features", "out_features"):
            assert getattr(got[name], field) == getattr(param, field), (name, field)
    routers = {router.name: router.plain_linear for router in found.routers}
    assert routers == {router.name: router.plain_linear for router in expected.routers}
    modules = {item.name: (item.dispatches, item.bias_names) for item in found.modules}
    assert modules == {item.name: (item.dispatches, item.bias_names) for item in expected.modules}


def traits(model_type: str) -> set[tuple[str, Any]]:
    """Return what the registry says of a type that decides what is computed."""
    experts = registry.load(model_type).experts
    found: set[tuple[str, Any]] = {
        ("roles", frozenset((item["role"], item["transposed"]) for item in experts)),
        ("modules", len({item["pattern"].rpartition(".")[0] for item in experts})),
    }
    plain = ("dispatches", "gated", "interleaved", "packed_rows", "post_norm")
    for item in experts:
        disk = item["checkpoint"]
        found |= {(name, item[name]) for name in plain}
        found |= {(name, len(item[name])) for name in ("biases", "aliases")}
        found.add(("router", item["router"] and item["router"]["plain_linear"]))
        found.add(("shared experts", item["shared_experts"]["kind"]))
        found.add(("on disk", (disk["layout"], len(disk["keys"]), bool(disk["together_with"]))))
    return found


def test_representatives_have_every_trait_of_the_types():
    types = registry.model_types()  # of every transformers
    assert len(types) >= 95
    assert set(REPRESENTATIVES) <= set(types)
    held = set().union(*map(traits, REPRESENTATIVES))
    assert not {name: traits(name) - held for name in types if traits(name) - held}


def test_qwen3_moe_by_hand():
    layout = expected_layout(registry.load("qwen3_moe"), "published")
    gate_up, down = layout.experts[:2]
    assert gate_up.name == "model.layers.0.mlp.experts.gate_up_proj"
    assert (gate_up.shape, gate_up.num_experts) == ((128, 1536, 2048), 128)
    assert (gate_up.in_features, gate_up.out_features) == (2048, 1536)
    assert (down.in_features, down.out_features, down.transposed) == (768, 2048, False)
    assert len(layout) == 48
    assert layout.nbytes == 24 * 3 * 128 * 768 * 2048 * 2
    assert layout.modules[0].router.name == "model.layers.0.mlp.gate.weight"
    assert registry.load("qwen3_moe").experts[0]["checkpoint"]["keys"] == [
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "model.layers.*.mlp.experts.*.up_proj.weight",
    ]


def test_tied_experts_have_one_entry():
    layout = expected_layout(registry.load("diffusion_gemma"), "tiny")
    assert len(layout) == 4
    assert layout.find("model.decoder.layers.1.experts.down_proj") is layout.experts[3]
    assert registry.load("diffusion_gemma").experts[0]["aliases"]


@pytest.mark.parametrize("model_type", TYPES)
def test_detector_agrees(model_type):
    """At tiny and at published size, and what else the file says of the model is there."""
    skip_renamed(model_type)
    entry = registry.load(model_type)
    assert entry.published, "every default configuration is completed where it lacks something"
    tiny = tiny_model(model_type, device="meta")
    for sizes, model in (("tiny", tiny), ("published", meta_model(entry))):
        expected = expected_layout(entry, sizes)
        names = [param.name for param in expected]
        assert len(names) == len(set(names)) > 0
        assert [param for module in expected.modules for param in module.parameters] == [*expected]
        compare(moe_qlora.detect(model), expected)
    for item in entry.experts:
        part = tiny.config
        for name in filter(None, item["config"].split(".")):
            part = getattr(part, name)
        for group in item["tiny"]["groups"]:
            assert [evaluate(term, part) for term in item["shape"]] == group["shape"]
    check_routers_and_shared_experts(entry, tiny)


@pytest.mark.parametrize("model_type", TYPES)
def test_tiny_model_runs(model_type):
    skip_renamed(model_type)
    model = tiny_model(model_type, seed=3)
    weights = dict(model.named_parameters())
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    for param in expected_layout(registry.load(model_type), "tiny"):
        stack = weights[param.name]
        assert tuple(stack.shape) == param.shape
        assert float(stack.std()) > 1e-3
    if model_type in NO_TEXT_FORWARD:
        with pytest.raises(ConfigError):
            tiny_inputs(model)
        return
    skip_llama4(model_type)
    with torch.no_grad():
        output = model(**tiny_inputs(model))
    first = output.logits if "logits" in output else output[0]
    assert first.shape[:2] == (2, 12)
    assert bool(torch.isfinite(first).all())


def check_routers_and_shared_experts(entry, model):
    modules = {name_pattern(name): module for name, module in model.named_modules()}
    weights = {name_pattern(name) for name, _ in model.named_parameters()}
    owners = {item["pattern"].rpartition(".")[0] for item in entry.experts}
    shared = set()
    for item in entry.experts:
        router, beside = item["router"], item["shared_experts"]
        if router is not None:
            assert router["weight"] in modules or router["weight"] in weights
            assert router["module"] in modules
        if beside["kind"] == "none":
            assert beside["module"] is None
            continue
        inside = list(modules[beside["module"]].modules())
        assert any(type(module) is nn.Linear for module in inside) == (beside["kind"] == "linear")
        shared.add(beside["module"])
    named = {
        name
        for name, module in modules.items()
        if "shared_exper" in name.rpartition(".")[2]
        and not name.endswith("gate")
        and any(parameter.dim() >= 2 for parameter in module.parameters())
        and any(name.startswith(owner.rpartition(".")[0].removesuffix("_moe")) for owner in owners)
    }
    assert named <= shared | owners


def evaluate(term, config):
    for sign, combine in (("*", int.__mul__), ("+", int.__add__)):
        if sign in term:
            first, second = term.split(sign)
            return combine(evaluate(first, config), evaluate(second, config))
    if term.isdigit():
        return int(term)
    for name in term.split("."):
        name, _, index = name.removesuffix("]").partition("[")
        config = getattr(config, name)
        config = config[int(index)] if index else config
    return config


def test_a_wrong_expectation_is_noticed():
    expected = expected_layout(registry.load("qwen3_moe"), "tiny")
    with pytest.raises(AssertionError):
        compare(moe_qlora.detect(tiny_model("mixtral", device="meta")), expected)
    with pytest.raises(AssertionError):
        compare(ModelLayout(experts=expected.experts[1:]), expected)
