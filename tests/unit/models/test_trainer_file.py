"""What a trainer's YAML file asks for, key by key, as axolotl 0.21.0 reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe_qlora.errors import ConfigError
from moe_qlora.models import trainer
from moe_qlora.models.trainer import checks
from moe_qlora.models.trainer.file import DEFAULT, AskedEngine, TrainerFile
from moe_qlora.packing.settings import CodecSettings

QLORA = """
base_model: Qwen/Qwen3-30B-A3B
adapter: qlora
load_in_4bit: true
plugins: [moe_qlora.integrations.axolotl.MoeQloraPlugin]
moe_qlora: {lora_experts: true}
lora_r: 32
lora_alpha: 64
lora_target_modules: [q_proj, v_proj]
"""
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin, {}]"
OURS = "moe_qlora.integrations.axolotl.MoeQloraPlugin"


def read(text: str, base: str = QLORA, model_type: str = "qwen3_moe", **more: Any) -> TrainerFile:
    content = yaml.safe_load(base) | (yaml.safe_load(text) or {})
    return trainer.read("train.yaml", content, more.get("folder", Path()), model_type)


def test_what_is_left_out_has_axolotls_defaults():
    found = read("")
    values = {name: asked.value for name, asked in found.settings.items()}
    assert values == {
        "seq": 512,
        "batch": 1,
        "accumulation": 1,
        "optimizer": "adamw",
        "checkpointing": False,
        "dtype": torch.bfloat16,
        "adapter_dtype": "float32",
        "rank": 32,
    }
    assert {name for name, asked in found.settings.items() if asked.key != DEFAULT} == {"rank"}
    assert found.packs_experts
    assert found.engine == AskedEngine("ddp", DEFAULT)
    assert not (found.faults or found.notes or found.unplanned)


def test_codes_are_packed_as_axolotls_loader_has_them():
    """Double quantization, computed in the model's dtype, stored in bfloat16."""
    bfloat16 = CodecSettings("nf4", True, torch.bfloat16, torch.bfloat16)
    assert read("").codec == bfloat16
    assert read("fp16: true").codec.compute_dtype == torch.float16
    assert read("", model_type="qwen2_moe").codec.storage_dtype == torch.float32
    sharded = read("fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}", model_type="jamba")
    assert sharded.codec.storage_dtype == torch.bfloat16
    assert read("", model_type="falcon_h1").codec.skip_modules == ("out_proj",)
    own = "bnb_config_kwargs: {bnb_4bit_quant_type: fp4, bnb_4bit_compute_dtype: float32}"
    assert read(own).codec == CodecSettings("fp4", True, torch.bfloat16, torch.float32)
    skips = "moe_qlora: {skip_modules: [lm_head]}"
    assert read(skips).codec.skip_modules == ("lm_head",)


SETTINGS = [
    ("sequence_len: 2048", {"seq": 2048}),
    ('sequence_len: "2048"', {"seq": 2048}),
    ("micro_batch_size: 4", {"batch": 4}),
    ("gradient_accumulation_steps: 8", {"accumulation": 8}),
    ("micro_batch_size: 2\nbatch_size: 8", {"batch": 2, "accumulation": 4}),
    ("optimizer: adamw_8bit", {"optimizer": "adamw_8bit"}),
    ("optimizer: adamw_bnb_8bit", {"optimizer": "adamw_8bit"}),
    ("optimizer: adamw_torch_8bit", {"optimizer": "adamw_8bit"}),
    ("optimizer: paged_adamw_32bit", {"optimizer": "paged_adamw"}),
    ("optimizer: paged_adamw_8bit", {"optimizer": "paged_adamw_8bit"}),
    ("bf16: false\nfp16: true", {"dtype": torch.float16}),
    ("fp16: true", {"dtype": torch.float16}),
    ("bf16: full", {"dtype": torch.bfloat16}),
    ("bf16: false\nfp16: false", {"dtype": torch.float32}),
    ("bf16: false\nfloat16: true", {"dtype": torch.float16}),
    ("bf16: false\nbfloat16: true", {"dtype": torch.bfloat16}),
    ("peft_autocast_adapter_dtype: false", {"adapter_dtype": "bfloat16"}),
    ("gradient_checkpointing: true", {"checkpointing": True}),
    ("gradient_checkpointing: offload", {"checkpointing": True}),
    ("gradient_checkpointing: false", {"checkpointing": False}),
    ("fsdp_config: {activation_checkpointing: true}", {"checkpointing": True}),
    ("attn_implementation: sdpa", {"attention": "sdpa"}),
    ("flash_attention: true", {"attention": "flash_attention_2"}),
    ("flex_attention: true", {"attention": "flex_attention"}),
    ("sdp_attention: true", {"attention": "sdpa"}),
    ("eager_attention: true", {"attention": "eager"}),
    ("flash_attention: false", {"attention": None}),
]


@pytest.mark.parametrize(("text", "expected"), SETTINGS, ids=[text for text, _ in SETTINGS])
def test_settings(text, expected):
    found = read(text)
    for name, value in expected.items():
        asked = found.settings.get(name)
        assert (asked and asked.value) == value
        if asked is not None:
            assert asked.key != DEFAULT
    assert not found.faults


def test_lora():
    found = read("").lora
    assert found.fields == {"lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    assert (found.experts, found.router, found.targets) == (True, False, "q_proj, v_proj, experts")
    config = found.config(8)
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 64, {"q_proj", "v_proj"})
    found = read(
        "lora_target_modules:\nlora_target_linear: true\nlora_modules_to_save: [lm_head]\n"
        "moe_qlora: {lora_experts: [down], lora_router: true}\nlora_exclude_modules: [o_proj]\n"
        "peft_use_rslora: true\nlora_rank_pattern: {q_proj: 4}"
    ).lora
    assert found.targets == "all-linear, lm_head, experts (down), routers"
    config = found.config(8)
    assert (config.target_modules, config.exclude_modules) == ("all-linear", {"o_proj"})
    assert (config.use_rslora, config.rank_pattern) == (True, {"q_proj": 4})
    assert config.modules_to_save == ["lm_head"]
    with pytest.raises(ConfigError, match="LoRA settings of the file are refused"):
        read("lora_target_linear: true\npeft_layers_to_transform: [0]").lora.config(8)
    assert read("adapter:\nload_in_4bit: false", "base_model: x").lora is None


PACKED = [
    ("", True, "nf4"),
    ("moe_qlora: {pack_experts: false}", False, "nf4"),
    ("plugins: []\nmoe_qlora:", False, "nf4"),
    ("plugins: []\nmoe_qlora:\nquantize_moe_experts: true", True, "nf4"),
    ("adapter: lora\nload_in_4bit: false\nload_in_8bit: true", True, "int8"),
    ("plugins: []\nmoe_qlora:\nadapter: lora\nload_in_4bit: false", False, None),
]


@pytest.mark.parametrize(("text", "experts", "kind"), PACKED)
def test_what_is_packed(text, experts, kind):
    found = read(text)
    assert (found.packs_experts, found.codec and found.codec.kind) == (experts, kind)
    assert not found.faults
    told = any("16 bit" in note or "quantize_moe_experts" in note for note in found.notes)
    assert told is (OURS not in str(yaml.safe_load(QLORA + text)["plugins"]))


def zero(tmp_path: Path, **section: Any) -> str:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": section}))
    return "deepspeed: ds.json"


WITHOUT = "base_model: x\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true"
ENGINES = [
    ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", ("fsdp", "fsdp_config", None)),
    ("fsdp_config: {fsdp_state_dict_type: X}\ndp_shard_size: 4", ("fsdp", "dp_shard_size", 4)),
    ("deepspeed: deepspeed_configs/zero3_bf16.json", ("zero3", "deepspeed", None)),
    ("deepspeed: deepspeed_configs/zero2.json", ("ddp", "deepspeed", None)),
    ("deepspeed: {zero_optimization: {stage: 3}}", ("zero3", "deepspeed", None)),
    ("device_map: auto", (None, "device_map", None)),
    ("world_size: 4", ("ddp", "world_size", 4)),
]


@pytest.mark.parametrize(("text", "expected"), ENGINES, ids=[text for text, _ in ENGINES])
def test_engines(text, expected):
    found = read(text, WITHOUT)
    assert found.engine == AskedEngine(*expected)
    assert not found.faults


def test_groups_of_ranks():
    assert read("fsdp_config: {version: 2}\ndp_replicate_size: 2").engine.copies == 2


def test_a_deepspeed_file_is_read_beside_the_yaml(tmp_path):
    found = read(zero(tmp_path, stage=2), WITHOUT, folder=tmp_path)
    assert found.engine.name == "ddp"
    assert "ZeRO stage 2 is planned as DDP" in " ".join(found.notes)
    text = zero(tmp_path, stage=3, offload_param={"device": "cpu"}, offload_optimizer="none")
    found = read(text, WITHOUT, folder=tmp_path)
    assert found.engine.name == "zero3"
    assert found.unplanned == ("deepspeed: offload_param to cpu",)
    assert "ZeRO stage 3 takes weights apart" in read(text, folder=tmp_path).faults[0]


UNPLANNED = [
    ("optimizer: muon", "optimizer muon (planned as adamw)"),
    ("optimizer: lion_8bit", "optimizer lion_8bit (planned as adamw_8bit, whose states are larger"),
    ("rl: dpo", "rl dpo"),
    ("activation_offloading: true", "activation_offloading"),
    ("gradient_checkpointing: offload", "gradient_checkpointing 'offload'"),
    ("context_parallel_size: 2", "context_parallel_size 2"),
    ("tiled_mlp: true", "tiled_mlp"),
    ("attn_implementation: sage", "attn_implementation sage"),
    ("eval_batch_size: 8", "eval_batch_size (evaluation takes more tokens"),
    ("fsdp_config: {offload_params: true}", "fsdp_config.offload_params"),
    ("fsdp_config: {version: 2}", "embeddings in float32"),
    ("peft_init_lora_weights: pissa", "peft_init_lora_weights"),
]


@pytest.mark.parametrize(("text", "said"), UNPLANNED, ids=[text for text, _ in UNPLANNED])
def test_what_decides_memory_and_is_not_planned_is_named(text, said):
    assert any(each.startswith(said) for each in read(text).unplanned)


def test_what_is_off_is_not_named():
    off = "rl:\nactivation_offloading: false\ncontext_parallel_size: 1\ntiled_mlp: false\n"
    off += "fsdp_config: {offload_params: false}\nembeddings_skip_upcast: true\neval_batch_size: 1"
    assert not read(off).unplanned


def test_what_matters_to_no_plan_is_silent():
    text = "wandb_project: x\noutput_dir: ./out\ndatasets: []\nval_set_size: 0.1\nlearning_rate: 1"
    found = read(text)
    assert not (found.faults or found.notes or found.unplanned)


TYPOS = [
    ("lora_expert: true", "lora_expert is no key of this file (did you mean lora_experts of the"),
    ("lora_exprets: true", "lora_exprets is no key of this file (did you mean lora_experts of the"),
    ("lora_experts: true", "lora_experts is at the top level, where axolotl ignores it: write moe"),
    (
        "moe_qlroa: {lora_experts: true}",
        "moe_qlroa is no key of this file (did you mean moe_qlora?",
    ),
    (
        "moe-qlora: {lora_experts: true}",
        "moe-qlora is no key of this file (did you mean moe_qlora?",
    ),
    (
        "moe_qlora: {lora_expert: true}",
        "moe_qlora.lora_expert is no setting (did you mean lora_exp",
    ),
    ("moe_qlora: {lora_experts: [dwon]}", "moe_qlora.lora_experts is ['dwon']; allowed are true"),
    (
        "sequence_length: 2048",
        "sequence_length is no key of axolotl 0.21.0 (did you mean sequence_",
    ),
    (
        "micro_batchsize: 2",
        "micro_batchsize is no key of axolotl 0.21.0 (did you mean micro_batch_",
    ),
    (
        "gradient_checkpoint: true",
        "gradient_checkpoint is no key of axolotl 0.21.0 (did you mean g",
    ),
    ("optimiser: adamw_8bit", "optimiser is no key of axolotl 0.21.0 (did you mean optimizer?)"),
    ("load_in_4_bit: true", "load_in_4_bit is no key of axolotl 0.21.0 (did you mean load_in_4bit"),
    ("lora_rank: 8", "lora_rank is no key of axolotl 0.21.0 (did you mean lora_"),
    (
        "bnb_config_kwargs: {bnb_4bit_quant_typ: fp4}",
        "bnb_config_kwargs.bnb_4bit_quant_typ is no s",
    ),
    ("fsdp_config: {offload_param: true}", "fsdp_config.offload_param is no setting (did you mean"),
    (
        "plugins: [moe_qlora.integrations.axolotl.MoeQLoraPlugin]",
        "plugins names moe_qlora.integrat",
    ),
]


@pytest.mark.parametrize(("text", "said"), TYPOS, ids=[text for text, _ in TYPOS])
def test_typos_are_faults_with_the_near_name(text, said):
    found = read(text)
    assert [fault[: len(said)] for fault in found.faults] == [said]
    assert found.faults[0].endswith(".")
    with pytest.raises(ConfigError, match=r"^train\.yaml: "):
        found.check()


FAULTS = [
    ("sequence_len: many", "sequence_len is 'many'; give a whole number of 1 or more."),
    ("micro_batch_size: 0", "micro_batch_size is 0; give a whole number of 1 or more."),
    ("gradient_checkpointing: true\nlora_target_linear: maybe", "lora_target_linear is 'maybe'"),
    ("lora_target_modules: {a: 1}", "lora_target_modules is {'a': 1}; give a list of names."),
    ("fsdp: [full_shard]", "fsdp is a list for FSDP1, which axolotl refuses"),
    ("fsdp_config: {fsdp_version: 1}", "fsdp_config is for FSDP1, which axolotl refuses"),
    ("fsdp_config: {version: 2}\noptimizer: adamw_8bit", "optimizer is 'adamw_8bit' beside fsdp_c"),
    ("fsdp_config: {version: 2}\ndeepspeed: zero1.json", "fsdp_config and deepspeed are both set"),
    ("load_in_4bit: false", "adapter is 'qlora' and load_in_4bit is not true"),
    ("plugins: []\nload_in_4bit: false", "adapter is 'qlora' and load_in_4bit is not true"),
    ("plugins: []\nadapter:", "load_in_4bit is true and adapter is missing, which axolotl refuses"),
]


@pytest.mark.parametrize(("text", "said"), FAULTS, ids=[text for text, _ in FAULTS])
def test_what_axolotl_refuses_is_a_fault(text, said):
    assert any(fault.startswith(said) for fault in read(text).faults), read(text).faults


def test_a_key_that_is_like_no_other_is_named_and_no_fault():
    found = read("my_own_thing: 1\nanother: 2")
    assert not found.faults
    assert found.notes[0].startswith("my_own_thing, another are no keys of axolotl 0.21.0")


def test_a_key_of_somebody_elses_plugin_is_no_typo():
    text = f"plugins: [{OURS}, their.Plugin]\nsequence_length: 9"
    assert not read(text).faults
    assert "sequence_length (did you mean sequence_len" in read(text).notes[0]


def test_keys_that_are_read_are_keys_of_axolotl():
    ours = {"lora_exclude_modules"}
    assert set(trainer.READ) - checks.AXOLOTL == ours


def test_liger_without_its_plugin_is_named():
    text = "liger_fused_linear_cross_entropy: true"
    assert "only where plugins names axolotl.integrations.liger" in read(text).notes[0]
    found = read(f"{text}\nliger_rope: true\n{LIGER.format(OURS)}")
    assert found.settings["liger"].value is True
    assert found.unplanned == ("liger_rope",)
    assert not found.notes
