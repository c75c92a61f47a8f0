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

BILLIONS = {
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "zai-org/GLM-4.5-Air": 106,
    "openai/gpt-oss-120b": 116.8,
    "tencent/Hunyuan-A13B-Instruct": 80.4,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400,
    "MiniMaxAI/MiniMax-M2": 229,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "allenai/OLMoE-1B-7B-0924": 6.92,
    "Qwen/Qwen3.5-397B-A17B": 397,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31.1,
}
"""Weights as their makers publish them, without layers for multi-token prediction; rounded."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_checkpoint_has_the_weights_that_its_makers_publish(name):
    known = registry.checkpoint_named(name)
    plain = {key: value for key, value in known.config.items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(known.model_type, **plain)
    with torch.device("meta"), initialization.no_init_weights():
        model = testing.model_class(known.model_type)._from_config(config)
    model.tie_weights()
    weights = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert weights == pytest.approx(BILLIONS[name], rel=0.01)
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
    with pytest.raises(
        moe_qlora.CheckpointError, match=r"did you mean .*gpt-oss-20b or gpt-oss-120b"
    ):
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
    assert note.startswith(f"{name} is a model type, in bfloat16: sizes are those of its default")
    assert ("Qwen/Qwen3" in note) is (name == "qwen3_moe")
