"""The base in the note of an adapter that was trained on a sharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.testing import run_distributed, tiny_model

SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def save_adapter(rank: int, world: int, folder: Path) -> None:
    model: Any = moe_qlora.load_sharded(
        folder / "base",
        BitsAndBytesConfig(**SETTINGS),
        lora_config=LoraConfig(r=2, target_modules=["q_proj"]),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(str(folder / "adapter"))


def test_an_adapter_of_a_sharded_model_names_its_base(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "other")):
        tiny_model("qwen3_moe", seed=seed, vocab_size=512).save_pretrained(tmp_path / name)
    run_distributed(save_adapter, 2, tmp_path)
    note = json.loads((tmp_path / "adapter" / "moe_qlora_adapter.json").read_text())
    assert note["dtype"] == "bfloat16" and "model.embed_tokens.weight" in note["base"]["bits"]
    moe_qlora.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(moe_qlora.AdapterError, match=r"was trained on .*other weights"):
        moe_qlora.merge_adapter(tmp_path / "other", tmp_path / "adapter", tmp_path / "again")
