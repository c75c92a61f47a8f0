"""Multimodal checkpoints, of which AutoModelForCausalLM loads the text model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from training import loaded
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig
from upstream import skip_llama4

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.testing import tiny_model

TYPES = ("qwen3_5_moe", "llama4")
IDS = torch.tensor([[5, 6, 7, 8]])
PACKED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module", params=TYPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "base"
    tiny_model(request.param, seed=1).save_pretrained(folder)
    return folder


def adapted(model: Any, *, packed: bool = True) -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if packed:
        model = moe_qlora.get_peft_model(model, config, experts=True)
    else:
        config.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(model, config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.eval()(input_ids=IDS).logits
    return out


def test_an_adapter_of_the_text_model_is_merged_into_all_of_it(folder: Path, tmp_path: Path):
    text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(text).__name__.endswith("ForCausalLM")
    before, model = logits(text), adapted(text, packed=False)
    model.save_pretrained(tmp_path / "adapter")
    wanted = logits(model)
    assert (wanted - before).abs().max() > 1e-2
    moe_qlora.merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype=torch.float32)
    with pytest.raises(moe_qlora.AdapterError, match="does not fit the base"):
        moe_qlora.export_adapter(
            tmp_path / "adapter", tmp_path / "served", base=folder, target="peft"
        )
    keys = {"_name_or_path", "architectures", "transformers_version", "dtype"}
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "merged")]
    assert configs[0].keys() - keys == configs[1].keys() - keys
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        merged = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        if auto is AutoModelForImageTextToText:
            skip_llama4(folder.parent.name.removesuffix("0"))  # the number of mktemp
        torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-5)


def test_a_packed_folder_says_how_it_is_loaded(folder: Path, tmp_path: Path):
    moe_qlora.quantize_checkpoint(folder, tmp_path / "packed", PACKED)
    with pytest.raises(ValueError, match=r"holds a packed .*ForConditionalGeneration: load it"):
        loaded(tmp_path / "packed", None)
    model = loaded(tmp_path / "packed", None, AutoModelForImageTextToText)
    assert "transformers_weights" not in vars(model.config.text_config)
    assert verify(tmp_path / "packed").good
    model = adapted(model)
    model.save_pretrained(tmp_path / "adapter")
    moe_qlora.merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    assert "transformers_weights" not in (tmp_path / "merged" / "config.json").read_text()
    model.unload().save_pretrained(tmp_path / "again")
    assert verify(tmp_path / "again").good
