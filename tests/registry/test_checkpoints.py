"""Well-known checkpoints at their own sizes, on meta: their number of weights, and their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import initialization

import moe_qlora
from moe_qlora import registry, testing
from moe_qlora.models import named
from tools.registry.checkpoints import CHECKPOINTS, TOLERANCE

SIZES = {sizes.names[0]: (kind, sizes) for kind, each in CHECKPOINTS.items() for sizes in each}


def test_the_registry_has_every_checkpoint_on_record():
    on_record = {
        name: (kind, sizes.config) for kind, sizes in SIZES.values() for name in sizes.names
    }
    seen = {known.name: (known.model_type, known.config) for known in registry.checkpoints()}
    assert seen == on_record


@pytest.mark.parametrize("name", SIZES)
def test_a_checkpoint_has_the_weights_that_its_makers_publish(name):
    model_type, sizes = SIZES[name]
    plain = {key: value for key, value in sizes.config.items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(model_type, **plain)
    with torch.device("meta"), initialization.no_init_weights():
        model = testing.model_class(model_type)._from_config(config)
    model.tie_weights()
    weights = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert weights == pytest.approx(sizes.billions, rel=TOLERANCE)
    experts = sum(param.numel for param in moe_qlora.detect(model)) / 1e9
    assert 0.78 * weights < experts < weights


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("QWEN/qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("gpt_oss_20b", "openai/gpt-oss-20b"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("glm-4.5-air", "zai-org/GLM-4.5-Air"),
    ],
)
def test_a_checkpoint_goes_by_its_hub_id_or_a_part_that_tells_it_apart(name, meant):
    known = registry.checkpoint_named(name)
    source = named.resolve(name)
    assert known is not None and known.name == source.label == meant
    assert source.config.model_type == known.model_type
    assert not any("default configuration" in note for note in source.notes)


def test_a_name_of_several_sizes_is_none_and_the_near_ones_are_said():
    assert registry.checkpoint_named("gpt-oss") is None
    with pytest.raises(moe_qlora.CheckpointError, match="gpt-oss-120b or gpt-oss-20b"):
        named.resolve("gpt-oss")
    with pytest.raises(moe_qlora.CheckpointError, match=r"did you mean qwen3-30b-a3b"):
        named.resolve("qwen3-30b-a3n")
    with pytest.raises(moe_qlora.CheckpointError, match=r"did you mean Qwen/Qwen3-30B-A3B"):
        named.resolve("Qwen/Qwen3-30B-A3")


def test_a_local_folder_of_that_name_wins(tmp_path, monkeypatch):
    testing.tiny_model("qwen3_moe", device="meta").config.save_pretrained(
        tmp_path / "qwen3-30b-a3b"
    )
    monkeypatch.chdir(tmp_path)
    assert Path("qwen3-30b-a3b").is_dir()
    assert named.resolve("qwen3-30b-a3b").config.num_hidden_layers < 48


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_a_default_configuration_is_called_so_first(name):
    note = named.resolve(name).notes[0]
    assert note.startswith(f"{name} is a model type: sizes are those of its default configuration")
    assert ("Qwen/Qwen3" in note) is (name == "qwen3_moe")
