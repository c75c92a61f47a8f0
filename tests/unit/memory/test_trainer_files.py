"""A plan and a diagnosis of a trainer's file are of what the file asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.memory.plan import OPTION, OWN_DEFAULT
from moe_qlora.models import named
from moe_qlora.models.trainer.file import DEFAULT
from moe_qlora.testing import tiny_config

OURS = "moe_qlora.integrations.axolotl.MoeQloraPlugin"
QLORA = {
    "base_model": "model",
    "adapter": "qlora",
    "load_in_4bit": True,
    "plugins": [OURS],
    "moe_qlora": {"lora_experts": True},
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "sequence_len": 128,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": "adamw_8bit",
    "gradient_checkpointing": True,
}
AS_ARGUMENTS = {
    "quantization_config": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "seq": 128,
    "batch": 2,
    "accumulation": 3,
    "optimizer": "adamw_8bit",
    "checkpointing": True,
    "rank": 4,
    "targets": "q_proj,v_proj,experts",
}
FIGURES = ("resident", "load_peak", "unpacked", "trained_weights", "peak", "kind", "double_quant")


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Write a file beside a small model, with keys changed, and None for those to leave out."""
    folder = tmp_path_factory.mktemp("trainer")
    tiny_config("qwen3_moe", dtype="bfloat16").save_pretrained(folder / "model")

    def written(**changes: Any) -> Path:
        keys = {key: value for key, value in (QLORA | changes).items() if value is not None}
        file = folder / "train.yaml"
        file.write_text(yaml.safe_dump(keys))
        return file

    return written


@pytest.fixture(scope="module")
def unchanged(write) -> moe_qlora.MemoryPlan:
    return moe_qlora.plan(write())


def figures(made: moe_qlora.MemoryPlan) -> dict[str, Any]:
    return {name: getattr(made, name) for name in FIGURES}


def test_a_file_is_planned_as_its_settings_given_as_arguments(write):
    file = write()
    made = moe_qlora.plan(file)
    asked = moe_qlora.plan(file.parent / "model", **AS_ARGUMENTS)
    assert figures(made) == figures(asked)
    assert made.settings.targets == "q_proj, v_proj, experts"
    assert asked.origins is None
    assert "origins" not in asked.as_dict()
    assert made.as_dict()["origins"] == made.origins


def test_what_is_given_goes_before_the_file(write):
    file = write()
    options = {"seq": 64, "rank": 8, "optimizer": "adamw", "checkpointing": False}
    made = moe_qlora.plan(file, **options)
    asked = moe_qlora.plan(file.parent / "model", **AS_ARGUMENTS | options)
    assert figures(made) == figures(asked)
    assert {name for name, origin in made.origins.items() if origin == OPTION} == {*options}
    keys = {"batch": "micro_batch_size", "accumulation": "gradient_accumulation_steps"}
    keys |= {"targets": "lora_target_modules, moe_qlora"}
    assert {name: made.origins[name] for name in keys} == keys
    assert (made.origins["adapter_dtype"], made.origins["attention"]) == (DEFAULT, OWN_DEFAULT)


def test_given_targets_a_lora_config_and_quantization_go_before_the_file(write):
    file = write()
    attention = moe_qlora.plan(file, targets="attention")
    assert attention.settings.targets == "attention"
    assert attention.settings.rank == 4
    assert attention.trained_weights < moe_qlora.plan(file).trained_weights
    config = moe_qlora.plan(file, lora_config=LoraConfig(r=2, target_modules=["q_proj"]))
    assert (config.settings.targets, config.settings.rank) == ("lora_config", 2)
    assert config.origins["rank"] == OPTION
    assert moe_qlora.plan(file, {"load_in_8bit": True}).kind == "int8"


CHANGES = [
    ("sequence_len", 256, "peak"),
    ("micro_batch_size", 4, "peak"),
    ("lora_r", 8, "trained_weights"),
    ("moe_qlora", {"lora_experts": False}, "trained_weights"),
    ("moe_qlora", {"lora_experts": ["down"]}, "trained_weights"),
    ("lora_target_modules", ["q_proj"], "trained_weights"),
    ("lora_modules_to_save", ["lm_head"], "trained_weights"),
    ("optimizer", "adamw_torch_fused", "peak"),
    ("gradient_checkpointing", False, "peak"),
    ("gradient_accumulation_steps", 1, "settings"),
    ("bf16", False, "unpacked"),
    ("bnb_config_kwargs", {"bnb_4bit_use_double_quant": False}, "resident"),
    ("plugins", [], "resident"),
    ("attn_implementation", "eager", "peak"),
    ("peft_autocast_adapter_dtype", False, "peak"),
]


@pytest.mark.parametrize(
    ("key", "value", "figure"), CHANGES, ids=[f"{k} {v}" for k, v, _ in CHANGES]
)
def test_each_key_changes_the_answer(write, unchanged, key, value, figure):
    more = {"moe_qlora": None} if key == "plugins" else {}
    after = moe_qlora.plan(write(**{key: value}, **more))
    assert getattr(after, figure) != getattr(unchanged, figure)


def test_without_the_plugin_experts_stay_in_16_bit(write):
    made = moe_qlora.plan(write(plugins=None, moe_qlora=None))
    assert made.rows()[0][0] == "packed Linear layers"
    assert any("fused experts stay in 16 bit" in note for note in made.notes)
    packed = moe_qlora.plan(
        write(plugins=None, moe_qlora=None), AS_ARGUMENTS["quantization_config"]
    )
    assert packed.resident == moe_qlora.plan(write()).resident


def test_lora_in_16_bit(write):
    file = write(adapter="lora", load_in_4bit=None, plugins=None, moe_qlora=None)
    made = moe_qlora.plan(file, gpus="1GiB", search=False)
    assert made.kind is None
    assert made.resident == made.load_peak == made.unpacked


def test_full_fine_tuning_is_not_planned(write):
    file = write(adapter=None, load_in_4bit=None, plugins=None, moe_qlora=None)
    with pytest.raises(ConfigError, match=r"train\.yaml: the file has no adapter and trains every"):
        moe_qlora.plan(file)


ENGINES = [
    ({}, "2x1GiB", ("ddp", 2), DEFAULT),
    ({"device_map": "auto"}, "2x1GiB", None, None),
    ({"fsdp_config": {"version": 2}, "optimizer": "adamw_torch"}, "2x1GiB", ("fsdp", 2), None),
    (
        {"fsdp_config": {"version": 2}, "optimizer": "adamw_torch", "dp_shard_size": 2},
        "4x1GiB",
        ("fsdp", 2),
        "dp_shard_size",
    ),
    (
        {"fsdp_config": {"version": 2}, "optimizer": "adamw_torch", "dp_replicate_size": 2},
        "4x1GiB",
        ("fsdp", 2),
        "fsdp_config",
    ),
    ({"plugins": [], "deepspeed": "zero3.json", "moe_qlora": None}, "2x1GiB", ("zero3", 2), None),
    ({"deepspeed": "zero2.json"}, "2x1GiB", ("ddp", 2), "deepspeed"),
    ({"deepspeed": "zero2.json"}, "1GiB", None, None),
]


@pytest.mark.parametrize(("changes", "gpus", "engine", "origin"), ENGINES)
def test_engines(write, changes, gpus, engine, origin):
    made = moe_qlora.plan(write(**changes), gpus=gpus, search=False)
    found = made.settings.engine
    assert (found and (found.name, found.ranks)) == engine
    if origin is not None:
        assert made.origins[engine[0]] == origin


def test_a_number_of_ranks_that_is_not_known_is_named(write):
    fsdp = {"fsdp_config": {"version": 2}, "optimizer": "adamw_torch"}
    made = moe_qlora.plan(write(**fsdp))
    assert made.settings.engine is None
    assert any("FSDP2 (give --gpus, or --fsdp" in note for note in made.notes)
    given = moe_qlora.plan(write(**fsdp), ddp=2)
    assert (given.settings.engine.name, given.origins["ddp"]) == ("ddp", OPTION)


def test_each_rank_of_a_file_loads_what_axolotl_loads(write):
    """The whole packed model, which is sharded then; of a model in 16 bit its share."""
    fsdp = {"fsdp_config": {"version": 2}, "optimizer": "adamw_torch"}
    made = moe_qlora.plan(write(**fsdp), gpus="2x1GiB", search=False)
    assert made.load_peak > made.whole > made.resident
    plain = {"adapter": "lora", "load_in_4bit": None, "plugins": None, "moe_qlora": None}
    made = moe_qlora.plan(write(**plain, deepspeed="zero3.json"), gpus="2x1GiB", search=False)
    assert made.load_peak == made.resident < made.whole


def test_errors_name_the_file_and_the_key(write):
    with pytest.raises(ConfigError, match=r"train\.yaml: sequence_length is no key of axolotl"):
        moe_qlora.plan(write(sequence_length=1))
    with pytest.raises(ConfigError, match=r"train\.yaml: sequence_len is 2000000; plans go up to"):
        moe_qlora.plan(write(sequence_len=2_000_000))
    fsdp = {"fsdp_config": {"version": 2}, "optimizer": "adamw_torch", "dp_shard_size": 8}
    with pytest.raises(ConfigError, match=r"train\.yaml: dp_shard_size is 8, and gpus names 2"):
        moe_qlora.plan(write(**fsdp), gpus="2x1GiB")
    with pytest.raises(ConfigError, match=r"^seq is 0; give"):
        moe_qlora.plan(write(), seq=0)


def test_what_is_not_planned_is_one_line(write):
    notes = moe_qlora.plan(write(rl="dpo", tiled_mlp=True)).notes
    assert [note for note in notes if note.startswith("Not planned")] == [
        "Not planned: tiled_mlp; rl dpo."
    ]


def test_a_diagnosis_has_the_compute_dtype_that_axolotl_sets(write):
    """float32, bitsandbytes' own default, would make the experts slow."""
    card = {"gpu": "H100"}
    made = moe_qlora.doctor(write(), **card)
    assert not [f for f in made.findings if "computed in" in f.what]
    slow = write(bnb_config_kwargs={"bnb_4bit_compute_dtype": "float32"})
    assert [f for f in moe_qlora.doctor(slow, **card).findings if "float32" in f.what]


def test_a_diagnosis_of_a_file_has_its_rank_and_its_faults(write):
    made = moe_qlora.doctor(write(lora_r=4096), gpu="H100")
    assert [f for f in made.findings if "rank" in f.what]
    assert not [f for f in moe_qlora.doctor(write(), gpu="H100").findings if "rank" in f.what]
    made = moe_qlora.doctor(write(lora_exprets=True, micro_batchsize=2), gpu="H100")
    assert not made.good
    assert [f.severity for f in made.findings if "is no key" in f.what] == ["problem"] * 2
    unpacked = moe_qlora.doctor(write(plugins=None, moe_qlora=None), gpu="H100")
    assert {layer.backend for layer in unpacked.layers} == {"unpacked"}


def test_a_named_folder_is_known(write):
    """What a packed folder's manifest says is read there."""
    file = write()
    assert named.resolve(file.parent / "model").folder == file.parent / "model"
    assert named.resolve(file).folder == file.parent / "model"
