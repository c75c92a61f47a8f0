"""Plans of which repeated layers are packed and run for the others, against plans of all layers."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from peft import LoraConfig

from moe_qlora.planning import planner as planning
from moe_qlora.planning.budget import Engine, Settings
from moe_qlora.planning.meta_model import source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import tiny_model
from tests.helpers.plans import plan

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
NUMBERED = (
    ({}, {"targets": "layers.4.self_attn.q_proj"}),
    ({}, {"lora_config": LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 4])}),
    ({"llm_int8_skip_modules": ["model.layers.2.self_attn", "lm_head"]}, {}),
)


def config_of(family, layers=5):
    """The configuration of a tiny model with enough layers for some to repeat."""
    return tiny_model(
        family, device="meta", dtype=torch.bfloat16, num_hidden_layers=layers, layer_types=None
    ).config


def of_all_layers(monkeypatch, *args, **settings):
    """The plan for which every layer is packed and run."""
    with monkeypatch.context() as patch:
        patch.setattr(planning, "tells_layers_apart", lambda *_: True)
        return plan(*args, **settings)


# Too little memory for any settings; each of two ranks; two devices of one process.
SMALL = {"targets": "attention", "gpus": "2MiB"}
RANKS = {"targets": "attention,experts", "gpus": "2x1GiB", "fsdp": 2, "search": False}
SPREAD = {"targets": "all-linear", "gpus": "2x1GiB", "search": False}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("deepseek_v3", SMALL, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", RANKS | {"checkpointing": False}, marks=pytest.mark.nightly),
        ("qwen3_next", RANKS | {"checkpointing": False}),
        ("deepseek_v3", SPREAD),
    ],
)
def test_a_plan_of_repeated_layers_is_that_of_all(family, settings, monkeypatch):
    """Bytes, device map, search and notes are the same, whether two layers of a kind run or all."""
    config = config_of(family, 4)
    made = plan(config, seq=64, **settings)
    assert asdict(made) == asdict(of_all_layers(monkeypatch, config, seq=64, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_layers_are_empty(family):
    """A plan packs the first and the last layer of a kind, and counts the weights of all."""
    source = source_of(config_of(family, 12), None)
    few = Planner(source, Settings(seq=64, engine=Engine("fsdp", 2)))
    skeleton = few.meta.skeleton
    assert skeleton is not None and skeleton.groups
    assert all(not list(few.meta.modules[name].parameters()) for name in skeleton.emptied)
    whole = source.build()
    assert source.nbytes == sum({id(t): t.nbytes for t in whole.parameters()}.values()) + sum(
        {id(t): t.nbytes for t in whole.buffers()}.values()
    )


@pytest.mark.parametrize(("packing", "settings"), NUMBERED)
def test_settings_that_name_a_layer_take_them_all(packing, settings, monkeypatch):
    """What names layers by number makes them differ, so that none stands for another."""
    config = config_of("qwen3_moe")
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **packing}
    made = plan(config, quantization, seq=64, **settings)
    plain = plan(config, {**quantization, "llm_int8_skip_modules": None}, seq=64)
    assert (made.trained_weights, made.resident) != (plain.trained_weights, plain.resident)
    every = of_all_layers(monkeypatch, config, quantization, seq=64, **settings)
    assert asdict(made) == asdict(every)
