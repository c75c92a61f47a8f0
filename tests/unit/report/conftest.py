"""Small real inputs, made once: a plain and a packed folder, a Trainer's run with its adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from training import four_steps, trainer_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.testing import tiny_model

LAYERS, EXPERTS, TOP_K = 3, 8, 2


@dataclass(frozen=True)
class Inputs:
    plain: Path
    packed: Path
    run: Path
    text: Path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    folder = tmp_path_factory.mktemp("report")
    plain, packed, run = folder / "plain", folder / "packed", folder / "run"
    model = tiny_model(
        "qwen3_moe",
        dtype=torch.bfloat16,
        vocab_size=300,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    model.save_pretrained(plain)
    byte_tokenizer().save_pretrained(plain)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    moe_qlora.quantize_checkpoint(plain, packed, BitsAndBytesConfig(**settings))
    byte_tokenizer().save_pretrained(packed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with moe_qlora.enabled():
        model = AutoModelForCausalLM.from_pretrained(packed)
    adapted = moe_qlora.get_peft_model(model, config, experts=True)
    trainer_of(adapted, four_steps(run, 1, dataloader_pin_memory=False)).train()
    text = folder / "sample.jsonl"
    rows = [{"text": f"Row {number} of a small sample, with words."} for number in range(12)]
    text.write_text("\n".join(map(json.dumps, rows)))
    return Inputs(plain, packed, run, text)
