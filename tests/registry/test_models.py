"""Registry files against transformers, the detector against these and other types, known names."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from representatives import cases
from transformers import initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from upstream import skip_llama4, skip_renamed

import moe_qlora
from moe_qlora import registry, testing
from moe_qlora.errors import CheckpointError, ConfigError
from moe_qlora.layout import ModelLayout
from moe_qlora.models import named
from moe_qlora.testing import model_class, registry_families, tiny_config, tiny_inputs, tiny_model

TYPES = registry_families()

NO_TEXT_FORWARD = {
    "dots3_note_vision_encoder": "takes image patches only",
    "qwen3_omni_moe": "has no forward of its own; its thinker and talker have their own files",
}


pytestmark = pytest.mark.filterwarnings("ignore")


def meta_model(config):
    """Build a model without initialization, which takes its time at published sizes."""
    model = build(model_class(config.model_type), config)
    model.tie_weights()
    return model


def build(maker, config):
    with torch.device("meta"), initialization.no_init_weights():
        return maker._from_config(config)


@pytest.mark.parametrize("name", ["llama", "../pyproject"])
def test_a_type_without_experts_is_in_no_registry(name):
    with pytest.raises(CheckpointError, match=f"'{name}' is not in the registry"):
        registry.load(name)


def filled(pattern: str, numbers: tuple[int, ...]) -> str:
    """Return the pattern with its `*` replaced, in order: ("a.*.b", (3,)) gives "a.3.b"."""
    rest = iter(numbers)
    return ".".join(str(next(rest)) if part == "*" else part for part in pattern.split("."))


def indices(text: str) -> Iterator[tuple[int, ...]]:
    """Yield (0,), (1,), (2,), (5,) for "0-2,5", and (0, 1), (0, 2) for "0.1,0.2"."""
    for part in filter(None, text.split(",")):
        if "." in part:
            yield tuple(int(number) for number in part.split("."))
        else:
            first, _, last = part.partition("-")
            yield from ((number,) for number in range(int(first), int(last or first) + 1))


def expected_experts(
    entry: registry.RegistryEntry, sizes: str
) -> dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]]:
    """Return (item, group, numbers) by names, in the model's order, at these sizes."""
    towers = list(dict.fromkeys(item["pattern"].partition("*")[0] for item in entry.experts))
    placed = [
        ((towers.index(item["pattern"].partition("*")[0]), at, order), (item, group, at))
        for order, item in enumerate(entry.experts)
        for group in item[sizes]["groups"]
        for at in indices(group["at"])
    ]
    found = [one for _, one in sorted(placed, key=lambda pair: pair[0])]
    named = {filled(item["pattern"], at): (item, group, at) for item, group, at in found}
    assert len(named) == len(found) > 0
    return named


def check_detected(found: ModelLayout, entry: registry.RegistryEntry, sizes: str) -> None:
    expected = expected_experts(entry, sizes)
    assert [param.name for param in found] == list(expected), found.rejected
    modules, routers = {}, {}
    for param in found:
        item, group, at = expected[param.name]
        rows, columns = group["shape"][-2:]
        rows //= group["experts"] if item["packed_rows"] else 1
        features = (columns, rows) if item["transposed"] else (rows, columns)
        known = features if item["transposed"] is not None else (None, None)
        assert (param.out_features, param.in_features) == known, param.name
        assert param.shape == tuple(group["shape"]) and param.num_experts == group["experts"]
        assert (param.role, param.transposed) == (item["role"], item["transposed"]), param.name
        assert set(param.aliases) == {filled(alias, at) for alias in item["aliases"]}, param.name
        modules[param.module_name] = item["dispatches"]
        if item["router"] is not None and item["router"]["weight"] is not None:
            routers[filled(item["router"]["weight"], at)] = item["router"]["plain_linear"]
    assert {item.name: item.dispatches for item in found.modules} == modules
    assert {router.name: router.plain_linear for router in found.routers} == routers


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [*((name, "tiny") for name in TYPES), *cases((name, "published") for name in TYPES)],
)
def test_detector_agrees(model_type, sizes):
    skip_renamed(model_type)
    entry = registry.load(model_type)
    assert entry.published and all(item["checkpoint"]["keys"] for item in entry.experts)
    published = CONFIG_MAPPING[entry.model_type](**entry.published_config)
    model = tiny_model(model_type, device="meta") if sizes == "tiny" else meta_model(published)
    check_detected(moe_qlora.detect(model), entry, sizes)


@pytest.mark.parametrize("model_type", TYPES)
def test_tiny_model_runs(model_type):
    skip_renamed(model_type)
    model = tiny_model(model_type, seed=3)
    weights = dict(model.named_parameters())
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    for name in expected_experts(registry.load(model_type), "tiny"):
        assert float(weights[name].std()) > 1e-3
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


# Weights as their makers publish them, without layers for multi-token prediction; rounded.
BILLIONS = {
    "openai/gpt-oss-120b": 116.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31.1,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_checkpoint_has_the_weights_that_its_makers_publish(name):
    known = registry.checkpoint_named(name)
    plain = {key: value for key, value in known.config.items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(known.model_type, **plain)
    model = meta_model(config)
    weights = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert weights == pytest.approx(BILLIONS[name], rel=0.01)
    experts = sum(param.numel for param in moe_qlora.detect(model)) / 1e9
    assert 0.78 * weights < experts < weights


def test_a_checkpoint_goes_by_its_hub_id_or_a_part_that_tells_it_apart():
    for name, meant in (
        ("QWEN/qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("gpt_oss_20b", "openai/gpt-oss-20b"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
    ):
        known, source = registry.checkpoint_named(name), named.resolve(name)
        assert known is not None and known.name == source.label == meant
        assert source.config.model_type == known.model_type
        assert not any("default configuration" in note for note in source.notes)
    for name, near in (
        ("gpt-oss", ".*gpt-oss-20b or gpt-oss-120b"),  # a name of several sizes
        ("qwen3-30b-a3n", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3", "Qwen/Qwen3-30B-A3B"),
    ):
        assert registry.checkpoint_named(name) is None
        with pytest.raises(CheckpointError, match=f"did you mean {near}"):
            named.resolve(name)


def test_a_local_folder_of_that_name_wins(tmp_path, monkeypatch):
    testing.tiny_config("qwen3_moe").save_pretrained(tmp_path / "qwen3-30b-a3b")
    monkeypatch.chdir(tmp_path)
    assert named.resolve("qwen3-30b-a3b").config.num_hidden_layers < 48


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_a_default_configuration_is_called_so_first(name):
    note = named.resolve(name).notes[0]
    assert note.startswith(f"{name} is a model type, in bfloat16: sizes are those of its default")
    assert ("Qwen/Qwen3" in note) is (name == "qwen3_moe")


ROOT = Path(__file__).parents[2]
OTHERS = sorted(set(CONFIG_MAPPING.keys()) - set(registry_families()))
PARTS = 12


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from tools.registry import classes, tiny

    return classes, tiny


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))]
)
def test_no_experts_in_other_types(part, tools):
    classes, tiny = tools
    found, looked_at, wanted = {}, 0, 0
    for model_type in OTHERS[part::PARTS]:
        config_class = CONFIG_MAPPING[model_type]
        try:
            maker = classes.model_class(config_class)
            if maker is None:
                continue
            wanted += 1
            sizes = tiny.tiny_kwargs(config_class, tiny.default_of(config_class), 4)
            model = build(maker, config_class(**sizes))
        except Exception:  # noqa: BLE001 - needs a library that is not here, or has no defaults
            continue
        looked_at += 1
        found |= {f"{model_type} {p.name}": p.evidence for p in moe_qlora.detect(model)}
    assert not found
    assert looked_at >= 0.65 * wanted, "too few could be built to say anything"


# Vision, speech and omni models hold whatever text model their configuration names; by default
# these hold a dense one. The experts found must be those of the text model alone.
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("internvl", "gpt_oss"),
        ("qwen2_audio", "llama4_text"),
        ("speech-encoder-decoder", "qwen3_moe"),
    ],
)
def test_text_experts_inside_a_composite_model(outer, inner, tools):
    classes, tiny = tools
    config_class = CONFIG_MAPPING[outer]
    kwargs = tiny.tiny_kwargs(config_class, tiny.default_of(config_class), 4)
    part = "decoder" if "decoder" in outer else "text_config"
    kwargs[part] = {**tiny_config(inner).to_dict(), "model_type": inner}
    layout = moe_qlora.detect(build(classes.model_class(config_class), config_class(**kwargs)))

    alone = moe_qlora.detect(tiny_model(inner, device="meta"))
    assert len(layout) == len(alone) > 0
    for param, expected in zip(layout, alone, strict=True):
        tail = expected.name.removeprefix("model.").removeprefix("transformer.")
        assert param.name.endswith(tail)
        for field in ("shape", "num_experts", "role", "transposed"):
            assert getattr(param, field) == getattr(expected, field), (param.name, field)
    assert [m.dispatches for m in layout.modules] == [m.dispatches for m in alone.modules]
