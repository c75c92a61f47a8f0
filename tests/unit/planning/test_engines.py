"""Plans of many GPUs against real shares, buckets and measured peaks."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning.budget import ENGINES, Engine, Settings
from moe_qlora.planning.model import source_of
from moe_qlora.planning.planner import Planner
from moe_qlora.testing import tiny_model
from tests.helpers import plans
from tests.helpers.plans import DOUBLE, MEASURED, plan

PACKINGS = {
    "nf4 double": DOUBLE,
    "fp4 in bfloat16": DOUBLE | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
                                 "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}  # fmt: skip
ODD = {"hidden_size": 72, "moe_intermediate_size": 40, "num_experts": 6, "num_hidden_layers": 2}
small = partial(plans.small, num_hidden_layers=3)


def packed_model(packing: str) -> nn.Module:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **ODD)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(**PACKINGS[packing]))
    return model


def planner(model, engine: Engine | None = None) -> Planner:
    return Planner(source_of(model, None), Settings(seq=16, engine=engine))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ranks", [2, 7])
def test_fsdp_holds_the_first_chunk_of_every_parameter(packing, ranks):
    """torch.chunk's first chunk is the largest, and FSDP2 pads the others to its size."""
    model = packed_model(packing)
    shardable = moe_qlora.prepare_sharding(copy.deepcopy(model))
    by_hand = sum(torch.chunk(tensor, ranks)[0].nbytes for tensor in shardable.parameters())
    by_hand += sum(tensor.nbytes for tensor in shardable.buffers())
    made = planner(model, Engine("fsdp", ranks))
    assert made.resident == by_hand
    one = made.with_settings(replace(made.settings, engine=None))
    assert one.resident == planner(model).resident
    assert made.load_peak - made.resident == one.load_peak - one.resident


def test_fsdp_cuts_adapters_gradients_and_moments():
    model = packed_model("nf4 double")
    made = plan(model, fsdp=3, seq=16, rank=5, targets="attention,experts", accumulation=2)
    config = LoraConfig(r=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    peft_model = moe_qlora.get_peft_model(model, config, experts=True)
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    share, peak = 4 * sum(torch.chunk(p, 3)[0].numel() for p in trained), made.peak
    assert (peak.parts["adapters"], peak.parts["optimizer states"]) == (share, 2 * share)
    assert (peak.largest["gradients"], peak.largest["optimizer step"]) == (share, share)
    assert made.trained_weights == sum(p.numel() for p in trained)


def test_ddp_has_all_and_its_buckets():
    asked = {"seq": 16, "targets": "attention,experts", "accumulation": 2}
    one, made = (plan(small(), **asked, **more) for more in ({}, {"ddp": 4}))
    # In distributed runs the offset of double quantization, 4 bytes, is padded to 16.
    padding = 12 * 3 * (2 + 4)  # experts and attention of three layers
    assert made.whole == one.resident
    assert made.resident == one.resident + padding
    assert made.load_peak == one.load_peak + padding
    buckets = 4 * one.trained_weights
    assert made.peak.nbytes == one.peak.nbytes + buckets + padding


def test_measured_on_two_h200s():
    """Qwen3-30B-A3B under FSDP2, float32 adapters: 10.3 GB of shares, 22.9 GB at the peak."""
    config, quantization = plans.qwen3_30b(), BitsAndBytesConfig(**MEASURED)
    made = plan(config, quantization, engine="fsdp:2", targets="attention,experts")
    assert made.resident + made.peak.parts["adapters"] == pytest.approx(10.3e9, rel=0.01)
    assert made.peak.nbytes == pytest.approx(22.9e9, rel=0.01)


def test_parts_of_a_rank_make_its_peak_and_one_process_says_nothing_of_engines():
    asked = partial(plan, small(num_hidden_layers=1), seq=64, search=False)
    for name in ENGINES:
        made = asked(**{name: 4}, gpus="4x2GiB", targets="attention,experts")
        assert sum(made.peak.parts.values()) == made.peak.nbytes
        assert [use.peak.nbytes for use in made.devices] == [made.peak.nbytes] * 4
        assert made.fits and made.device_map is None
        assert made.as_dict()["engine"] == {"name": name, "ranks": 4, "whole": made.whole}
    made = asked(gpus="2GiB")
    said = made.as_dict()
    assert not {"engine", "whole"} & (said.keys() | said["training"].keys())
    assert not {"gathered weights", "gradient buckets"} & said["peak"]["at_peak"].keys()
    assert not any("device_map" in note for note in made.notes)
    (note,) = asked(gpus="8x1GiB").notes
    assert "spread over the 8 GPUs in one process (device_map)" in note
    notes = asked(gpus="8x1GiB", engine="fsdp:4").notes
    assert notes[0] == "2 groups of 4 ranks; each group holds the whole model."
    assert "loads the whole packed model, " in notes[1]  # under accelerate's plugin
