"""Trainer's checkpoints on two ranks: their adapter is the stock file, and training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model
from tests.helpers.training import (
    NF4,
    four_steps,
    loaded,
    logged_losses,
    take_fsdp_on_cpus,
    trainer_of,
)

SIZES = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 6, "vocab_size": 256}
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"]}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2, full": {**FSDP2, "state_dict_type": "FULL_STATE_DICT"},
    "fsdp2, sharded, loaded by all": {
        **FSDP2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    },
}


def trainer(folder: Path, name: str, world: int, fsdp: dict[str, Any]) -> Trainer:
    AcceleratorState._reset_state(True)
    model = loaded(folder / "plain", NF4)
    torch.manual_seed(1)
    config = LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = moe_qlora.get_peft_model(model, config, experts=True)
    options = {"fsdp": True, "fsdp_config": dict(fsdp)} if fsdp else {}
    return trainer_of(model, four_steps(folder / name, world, use_cpu=True, **options))


def all_cases(rank: int, world: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    take_fsdp_on_cpus()
    results = {}
    for name, fsdp in CASES.items():
        first = trainer(folder, name, world, fsdp)
        first.train()
        again = trainer(folder, f"{name}, again", world, fsdp)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
        again.model.save_pretrained(folder / name / "adapter")
        results[name] = logged_losses(first), logged_losses(again)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    tiny_model("qwen3_moe", num_hidden_layers=2, **SIZES).save_pretrained(folder / "plain")
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> list[float]:
    trained = trainer(folder, "single", 1, {})
    trained.train()
    trained.save_model(str(folder / "single" / "adapter"))
    return logged_losses(trained)


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(all_cases, 2, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_a_checkpoint(
    results: list[dict[str, Any]], single: list[float], folder: Path, case: str
) -> None:
    for result in results:
        for trained in result[case]:
            assert trained == pytest.approx(single, abs=1e-5)
    expected = load_file(folder / "single" / "adapter" / "adapter_model.safetensors")
    saved = load_file(folder / case / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(saved[key], tensor, atol=1e-4), key
