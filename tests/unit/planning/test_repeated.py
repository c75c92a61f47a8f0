"""Plans of which repeated layers are packed and run for the others, against plans of all layers."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from peft import LoraConfig

from moe_qlora.planning import plan as planning
from moe_qlora.planning.model import source_of
from tests.helpers.plans import config_of, plan

NUMBERED = (
    ({}, {"targets": "layers.4.self_attn.q_proj"}),
    ({}, {"lora_config": LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 4])}),
    ({"llm_int8_skip_modules": ["model.layers.2.self_attn", "lm_head"]}, {}),
)


def of_all_layers(monkeypatch, *args, **settings):
    """The plan for which every layer is packed and run."""
    with monkeypatch.context() as patch:
        patch.setattr(planning, "source_of", lambda *of: replace(source_of(*of), repeats=False))
        return plan(*args, **settings)


# Each of two ranks; two devices of one process.
RANKS = {"targets": "attention,experts", "gpus": "2x1GiB", "fsdp": 2, "search": False}
SPREAD = {"targets": "all-linear", "gpus": "2x1GiB", "search": False}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3_next", RANKS | {"checkpointing": False}), ("deepseek_v3", SPREAD)],
)
def test_a_plan_of_repeated_layers_is_that_of_all(family, settings, monkeypatch):
    """Bytes, device map, search and notes are the same, whether two layers of a kind run or all."""
    config = config_of(family, 4)
    made = plan(config, seq=64, **settings)
    assert asdict(made) == asdict(of_all_layers(monkeypatch, config, seq=64, **settings))


@pytest.mark.parametrize(("packing", "settings"), NUMBERED)
def test_settings_that_name_a_layer_take_them_all(packing, settings, monkeypatch):
    """What names layers by number makes them differ, so that none stands for another."""
    config = config_of(layers=5)
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **packing}
    made = plan(config, quantization, seq=64, **settings)
    plain = plan(config, {**quantization, "llm_int8_skip_modules": None}, seq=64)
    assert (made.trained_weights, made.resident) != (plain.trained_weights, plain.resident)
    every = of_all_layers(monkeypatch, config, quantization, seq=64, **settings)
    assert asdict(made) == asdict(every)
