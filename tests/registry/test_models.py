"""Every registry file against transformers, and the detector against every registry file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

import moe_qlora
from moe_qlora import registry
from moe_qlora.errors import ConfigError
from moe_qlora.layout import ModelLayout
from moe_qlora.testing import model_class, registry_families, tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]
TYPES = registry_families()

NO_TEXT_FORWARD = {
    "dots3_note_vision_encoder": "takes image patches only",
    "qwen3_omni_moe": "has no forward of its own; its thinker and talker have their own files",
}


@pytest.fixture(autouse=True)
def _own_warnings_only():
    """What transformers warns about while it builds a model is not ours to mend."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


pytestmark = pytest.mark.filterwarnings("ignore")


def meta_model(model_type, kwargs):
    with torch.device("meta"):
        model = model_class(model_type)._from_config(
            transformers.CONFIG_MAPPING[model_type](**kwargs)
        )
    model.tie_weights()
    return model


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


def test_about_a_hundred_types():
    assert len(TYPES) >= 95
    assert {"dbrx", "gpt_oss", "jetmoe", "llama4", "mixtral", "qwen3_moe"} <= set(TYPES)


@pytest.mark.parametrize("model_type", TYPES)
def test_detector_agrees_at_tiny_size(model_type):
    model = tiny_model(model_type, device="meta")
    compare(moe_qlora.detect(model), registry.layout(model_type, "tiny"))


@pytest.mark.parametrize("model_type", TYPES)
def test_detector_agrees_at_published_size(model_type):
    entry = registry.load(model_type)
    assert entry.published, "every default configuration is completed where it lacks something"
    model = meta_model(model_type, entry.published_config)
    compare(moe_qlora.detect(model), registry.layout(model_type, "published"))


@pytest.mark.parametrize("model_type", TYPES)
def test_tiny_model_runs(model_type):
    model = tiny_model(model_type, seed=3)
    weights = dict(model.named_parameters())
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    for param in registry.layout(model_type, "tiny"):
        stack = weights[param.name]
        assert tuple(stack.shape) == param.shape
        assert float(stack.std()) > 1e-3
    if model_type in NO_TEXT_FORWARD:
        with pytest.raises(ConfigError):
            tiny_inputs(model)
        return
    with torch.no_grad():
        output = model(**tiny_inputs(model))
    first = output.logits if "logits" in output else output[0]
    assert first.shape[:2] == (2, 12)
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("model_type", TYPES)
def test_shapes_follow_from_the_configuration(model_type):
    """The written shape, evaluated on the tiny configuration, is the tiny shape."""
    entry = registry.load(model_type)
    config = transformers.CONFIG_MAPPING[model_type](**entry.tiny_config)
    for param in entry.params:
        part = config
        for name in filter(None, param.config.split(".")):
            part = getattr(part, name)
        for group in param.tiny:
            assert tuple(evaluate(term, part) for term in param.shape) == group.shape


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
    expected = registry.layout("qwen3_moe", "tiny")
    with pytest.raises(AssertionError):
        compare(moe_qlora.detect(tiny_model("mixtral", device="meta")), expected)
    with pytest.raises(AssertionError):
        compare(ModelLayout(experts=expected.experts[1:]), expected)


@pytest.mark.parametrize("model_type", TYPES)
def test_file_is_what_the_generator_writes(model_type, monkeypatch):
    entry = registry.load(model_type)
    if entry.transformers != transformers.__version__:
        pytest.skip(f"generated from transformers {entry.transformers}")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from tools.registry.describe import describe

    held = json.loads((ROOT / "model_registry" / f"{model_type}.json").read_text("utf-8"))
    assert json.loads(json.dumps(describe(model_type))) == held
