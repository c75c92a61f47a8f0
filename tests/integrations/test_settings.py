"""What the axolotl plugin refuses in a file; needs no axolotl."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from moe_qlora.errors import ConfigError
from moe_qlora.integrations.settings import _REFUSED, check, wants_packing

QLORA = {"adapter": "qlora", "load_in_4bit": True}

COLLIDING = {
    "nf4_backend": "torchao",
    "tensor_parallel_size": 2,
    "expert_parallel_size": 4,
    "deepspeed": "configs/zero3_bf16.json",
    "fsdp_config": "{cpu_ram_efficient_loading: true}",
    "experts_implementation": "grouped_mm",
}
CASES: list[tuple[str, str]] = [
    ("adapter:", "adapter is None, and moe_qlora packs experts for LoRA: set adapter: qlora"),
    ("load_in_4bit: false", "adapter is 'qlora' and load_in_4bit is not true: set load_in"),
    ("adapter: lora", "adapter is 'lora' and load_in_4bit is true: set load_in_8bit: true"),
    ("{peft_use_dora: true, moe_qlora: {lora_experts: true}}", "peft_use_dora is true, and moe_q"),
    ("{torch_compile: auto, moe_qlora: {prepare_training: 40GiB}}", "torch_compile is set, and p"),
    ("moe_qlora: {lora_expert: true}", "moe_qlora.lora_expert is True: Extra inputs are not"),
    *((f"{key}: {COLLIDING.get(key, 'true')}", f"{key} is set beside") for key in _REFUSED),
]


@pytest.mark.parametrize(("text", "message"), CASES, ids=[text for text, _ in CASES])
def test_one_sentence(text: str, message: str) -> None:
    config: dict[str, Any] = QLORA | yaml.safe_load(text)
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError) as error:
        check(config)
    said = str(error.value)
    assert said.startswith(message) and said.endswith(".")
    assert "\n" not in said and ". " not in said
    assert config == before


def test_good_files() -> None:
    check({"adapter": "lora", "load_in_8bit": True})
    harmless = {
        "tensor_parallel_size": 1, "deepspeed": "configs/zero2.json", "expert_parallel_size": 1,
        "nf4_backend": "bitsandbytes", "quantize_moe_experts": False, "relora": None,
        "experts_implementation": "eager", "peft_use_dora": True,
        "fsdp_config": {"cpu_ram_efficient_loading": False},
    }  # fmt: skip
    check(QLORA | harmless)
    assert wants_packing(QLORA | harmless)
    for nothing_packed in (
        {"moe_qlora": {"pack_experts": False}, "quantize_moe_experts": True},
        {"merge_lora": True, "load_in_4bit": False, "adapter": "qlora"},
    ):
        check(nothing_packed)
        assert not wants_packing(nothing_packed)


def test_a_validated_configuration_is_planned() -> None:
    """`axolotl moe-experts CONFIG --gpus GPUS` gives plan what axolotl's validation left."""
    from types import SimpleNamespace

    from moe_qlora.integrations.settings import plan_arguments
    from moe_qlora.planning.plan import plan_settings

    cfg = SimpleNamespace(
        base_model="qwen3_moe",
        **QLORA,
        micro_batch_size=2,
        sequence_len=256,
        gradient_accumulation_steps=4,
        lora_r=8,
        lora_target_modules=["q_proj", "v_proj"],
        moe_qlora={"lora_experts": True},
        gradient_checkpointing=True,
        optimizer=SimpleNamespace(value="adamw_bnb_8bit"),
    )
    settings = plan_settings(**plan_arguments(cfg, 1), search=False).settings
    assert (settings.batch, settings.seq, settings.rank, settings.accumulation) == (2, 256, 8, 4)
    assert (settings.targets, settings.optimizer) == ("q_proj,v_proj,experts", "adamw_8bit")
    assert settings.checkpointing and settings.engine is None
    assert plan_arguments(cfg, 4)["engine"] == "ddp"
    cfg.fsdp_config = {"reshard_after_forward": True}
    assert plan_arguments(cfg, 4)["engine"] == "fsdp"
    for change, message in (
        ({"adapter": None}, "adapter is None, and plans are of LoRA on packed"),
        ({"load_in_4bit": None}, "adapter is 'qlora', and plans are of LoRA on packed"),
        ({"lora_target_modules": ".*q_proj"}, "lora_target_modules is '.*q_proj', and plans take"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            plan_arguments(SimpleNamespace(**{**vars(cfg), **change}), 1)
