"""Plans of which repeated layers, and turns over a sequence, run for the others: as of all."""

from dataclasses import asdict, replace

import pytest
import torch
from peft import LoraConfig

from moe_qlora.planning import plan as planning
from moe_qlora.planning import step
from moe_qlora.planning.budget import Settings
from moe_qlora.planning.model import source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import tiny_model
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


@pytest.mark.parametrize(("seq", "checkpointing"), [(2048, True), (2399, False)])
def test_loops_over_a_shorter_sequence_take_the_bytes_of_a_long_one(
    seq, checkpointing, monkeypatch
):
    def peak():
        model = tiny_model("qwen3_next", device="meta", dtype=torch.bfloat16)
        settings = Settings(seq=seq, checkpointing=checkpointing)
        return Planner(source_of(model, None), settings).report(()).peak.nbytes

    short = peak()
    monkeypatch.setattr(step, "_TURNS", seq)
    assert short == pytest.approx(peak(), rel=0.01)
