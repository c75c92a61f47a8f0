"""Plans of many GPUs against sums done by hand: shares, gathered layers, buckets, errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.planning.budget import ENGINES, Activity, Block, BlockTensor, Engine, Settings
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


def layers_by_hand() -> tuple[dict[str, Block], list[Activity]]:
    def tensors(*rows: int, trained: int = 0) -> tuple[BlockTensor, ...]:
        own = tuple(BlockTensor("other", count, 10, 2) for count in rows)
        return (*own, BlockTensor("trained", trained, 1, 4)) if trained else own

    blocks = [
        Block("embed", tensors=tensors(100)),
        *(Block(f"layers.{i}", layer=True, tensors=tensors(7 + i, trained=9)) for i in range(3)),
        Block("norm", tensors=tensors(1)),
        Block("head", tensors=tensors(50)),
    ]
    activities = [Activity(block.name, 0, 0, 0) for block in blocks]
    return {block.name: block for block in blocks}, activities


def test_fsdp_gathers_the_root_and_two_layers():
    blocks, activities = layers_by_hand()
    counted = Engine("fsdp", 4).with_gathered(activities, blocks)
    # Padded to multiples of 4 rows: 100 + 4 + 52 of the root, 8, 8 and 12 of the layers, and of
    # their 9 trained ones 12.
    root, trained = (100 + 4 + 52) * 20, 12 * 4
    layers = [8 * 20 + trained, 8 * 20 + trained, 12 * 20 + trained]
    assert [activity.gathered for activity in counted] == [
        2 * root,
        root + layers[0] + layers[1],
        root + layers[1] + layers[2],
        root + layers[2] + layers[2],
        root + layers[2],
        root + layers[2],
    ]
    assert [activity.reduced for activity in counted] == [trained] * 4 + [0, 0]


def test_measured_on_two_h200s():
    """Qwen3-30B-A3B under FSDP2, float32 adapters: 10.3 GB of shares, 22.9 GB at the peak."""
    config, quantization = plans.qwen3_30b(), BitsAndBytesConfig(**MEASURED)
    made = plan(config, quantization, engine="fsdp:2", targets="attention,experts")
    assert made.resident + made.peak.parts["adapters"] == pytest.approx(10.3e9, rel=0.01)
    assert made.peak.nbytes == pytest.approx(22.9e9, rel=0.01)


@pytest.mark.parametrize("name", ENGINES)
def test_parts_of_a_rank_make_its_peak(name):
    asked = {"seq": 64, "targets": "attention,experts", "search": False}
    made = plan(small(num_hidden_layers=1), **{name: 4}, gpus="4x2GiB", **asked)
    assert sum(made.peak.parts.values()) == made.peak.nbytes
    assert len(made.devices) == 4
    assert {use.peak.nbytes for use in made.devices} == {made.peak.nbytes}
    assert made.fits and made.device_map is None
    said = made.as_dict()
    assert said["engine"] == {"name": name, "ranks": 4, "whole": made.whole}
    json.dumps(said)


def test_one_process_says_nothing_of_engines_and_how_several_gpus_are_used():
    made = plan(small(), gpus="2GiB", seq=64, search=False)
    said = made.as_dict()
    assert not {"engine", "whole"} & (said.keys() | said["training"].keys())
    assert not {"gathered weights", "gradient buckets"} & said["peak"]["at_peak"].keys()
    assert not any("device_map" in note for note in made.notes)
    (note,) = plan(small(), gpus="8x1GiB", seq=64, search=False).notes
    assert "spread over the 8 GPUs in one process (device_map)" in note
    notes = plan(small(), gpus="8x1GiB", engine="fsdp:4", seq=64, search=False).notes
    assert notes[0] == "2 groups of 4 ranks; each group holds the whole model."
    assert "loads the whole packed model, " in notes[1]  # under accelerate's plugin


def test_the_command_plans_a_rank(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_qlora.planning.planner.Planner.largest", lambda *args: 64)
    small(num_hidden_layers=1).save_pretrained(tmp_path)
    asked = "--seq", 64, "--fsdp", 4, "--quant", "fp4", "--no-double-quant", "--json"
    code, out, err = cli("plan", tmp_path, *asked)
    assert (code, err) == (0, "")
    fp4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "bfloat16"}
    made = plan(str(tmp_path), fp4, seq=64, engine="fsdp:4")
    assert json.loads(out) == json.loads(json.dumps(made.as_dict()))
