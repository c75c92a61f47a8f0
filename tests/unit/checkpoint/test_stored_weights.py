"""Stored shapes that are not the model's, and weights that are not finite, on every way in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import loaded, lora
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import CheckpointError, NonFiniteWeightError
from moe_qlora.testing import tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
KEY = "model.layers.0.self_attn.k_proj.weight"


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(-1, -2).contiguous()


def half_the_experts(weight: torch.Tensor) -> torch.Tensor:
    """The same number of values in half as many experts."""
    return weight.reshape(weight.shape[0] // 2, weight.shape[1] * 2, *weight.shape[2:])


def without_a_row(weight: torch.Tensor) -> torch.Tensor:
    return weight[1:].contiguous()


CHANGES = [
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj", transposed),
    ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", half_the_experts),
    ("gpt_oss", KEY, transposed),
    ("qwen3_moe", KEY, transposed),
    ("qwen3_moe", KEY, without_a_row),
    ("qwen3_moe", KEY, half_the_experts),
    ("qwen3_moe", "model.layers.0.mlp.gate.weight", transposed),
    ("qwen3_moe", "model.norm.weight", without_a_row),
]


def write(folder: Path, family: str) -> Path:
    sizes = {"intermediate_size": 96} if family == "gpt_oss" else {}
    tiny_model(family, dtype=torch.bfloat16, **sizes).save_pretrained(folder)
    return folder


def store_changed(folder: Path, key: str, how: Any) -> str:
    """Store another value under a key; return a pattern of both shapes and the name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    right = tuple(tensors[key].shape)
    tensors[key] = how(tensors[key])
    wrong = tuple(tensors[key].shape)
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{re.escape(key)} .*{re.escape(str(wrong))}.*{re.escape(str(right))}"


@pytest.mark.parametrize(
    ("family", "key", "change"), CHANGES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_another_shape_is_refused_on_every_way_in(tmp_path, family, key, change):
    source, packed = write(tmp_path / "plain", family), tmp_path / "packed"
    moe_qlora.quantize_checkpoint(source, packed, NF4)
    adapter = tmp_path / "adapter"
    lora(loaded(packed, None, dtype="auto"), "v_proj").save_pretrained(adapter)
    said = store_changed(source, key, change)
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, tmp_path / "out", NF4),
        lambda: verify(packed, against=source),
        lambda: moe_qlora.merge_adapter(source, adapter, tmp_path / "out"),
        *([lambda: loaded(source, NF4, dtype="auto")] if key == KEY else []),
    ):
        with pytest.raises(CheckpointError, match=said):
            way()
        assert not (tmp_path / "out").exists()
    # Packed weights are named by one sentence; transformers refuses others itself, from 5.23 on.
    fault, said = (CheckpointError, key) if "proj" in key else (RuntimeError, "above report")
    if "proj" in key or TRANSFORMERS >= (5, 23):
        with pytest.raises(fault, match=re.escape(said)):
            loaded(source, NF4, dtype="auto")


def poison(value: float) -> Any:
    place = torch.tensor(3), torch.tensor(5)
    return lambda weight: weight.index_put(place, torch.tensor(value).to(weight))


def assert_not_finite(source: Path, packed: Path, settings: Any) -> None:
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, packed, settings),
        lambda: loaded(source, settings, dtype="auto"),
    ):
        with pytest.raises(NonFiniteWeightError, match=re.escape(KEY)):
            way()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [NF4, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_a_linear_layer_that_is_not_finite_is_refused(tmp_path, value, settings):
    """bitsandbytes would spread one NaN over the whole weight, through the mean of its absmax."""
    source = write(tmp_path / "plain", "qwen3_moe")
    store_changed(source, KEY, poison(value))
    assert_not_finite(source, tmp_path / "packed", settings)


@pytest.mark.parametrize("fault", ["code", "nan", "inf"])
def test_a_makers_linear_layer_that_is_not_finite_is_refused(tmp_path, fault):
    source = write(tmp_path / "plain", "qwen3_moe")
    file = source / "model.safetensors"
    tensors = load_file(file)
    codes = tensors[KEY] = tensors[KEY].to(torch.float8_e4m3fn)
    tensors[f"{KEY}_scale_inv"] = torch.ones(1, 1)
    if fault == "code":
        codes.view(torch.uint8)[1, 2] = 0x7F  # NaN
    else:
        tensors[f"{KEY}_scale_inv"][0, 0] = float(fault)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    assert_not_finite(source, tmp_path / "packed", NF4)
