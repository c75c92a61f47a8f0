"""Every registry file against transformers, and the detector against every registry file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import initialization
from upstream import skip_llama4, skip_renamed

import moe_qlora
from moe_qlora import registry
from moe_qlora.errors import ConfigError
from moe_qlora.layout import ModelLayout
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


def expected_experts(
    entry: registry.RegistryEntry, sizes: str
) -> dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]]:
    """Return (item, group, numbers) by the names of weights at "published" or "tiny" sizes.

    They are in the model's own order: layer by layer, and within a layer as the file lists them.
    """
    towers = list(dict.fromkeys(item["pattern"].partition("*")[0] for item in entry.experts))
    placed = [
        ((towers.index(item["pattern"].partition("*")[0]), at, order), (item, group, at))
        for order, item in enumerate(entry.experts)
        for group, at in instances(item[sizes])
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


@pytest.mark.parametrize("model_type", TYPES)
def test_detector_agrees(model_type):
    """At tiny and at published size."""
    skip_renamed(model_type)
    entry = registry.load(model_type)
    assert entry.published, "every default configuration is completed where it lacks something"
    tiny = tiny_model(model_type, device="meta")
    for sizes, model in (("tiny", tiny), ("published", meta_model(entry))):
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
