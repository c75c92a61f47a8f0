"""Stored weights of another shape or dtype, not finite, or not there: refused on every way in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import set_json
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import loaded, lora
from upstream import TRANSFORMERS

import moe_qlora
from moe_qlora.checkpoint.verify import verify
from moe_qlora.errors import CheckpointError, NonFiniteWeightError, UnsupportedWeightError
from moe_qlora.testing import tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
KEY = "model.layers.0.self_attn.k_proj.weight"
FP8, NAN, INF = torch.float8_e4m3fn, float("nan"), float("inf")
Change = Callable[[dict[str, Tensor], str], Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By family: a folder, the packed one of it, and an adapter."""
    root = tmp_path_factory.mktemp("stored")
    for family, sizes in (("qwen3_moe", {}), ("gpt_oss", {"intermediate_size": 96})):
        place = root / family
        tiny_model(family, dtype=torch.bfloat16, **sizes).save_pretrained(place / "plain")
        moe_qlora.quantize_checkpoint(place / "plain", place / "packed", NF4)
        lora(loaded(place / "packed", None, dtype="auto"), "v_proj").save_pretrained(
            place / "adapter"
        )
    return root


def changed(folder: Path, to: Path, part: str, change: Change) -> tuple[Path, dict[str, Tensor]]:
    """A copy in which `change(tensors, key)` is done for keys with a part; and the tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    for key in [key for key in tensors if part in f"{key} "]:
        change(tensors, key)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to, tensors


def made(how: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, key: tensors.update({key: how(tensors[key]).contiguous()})


TURNED, CUT = made(lambda weight: weight.transpose(-1, -2)), made(lambda weight: weight[1:])
# The same number of values in half as many experts.
HALVED = made(lambda weight: weight.reshape(len(weight) // 2, -1, weight.shape[-1]))


@pytest.mark.parametrize(
    ("family", "key", "change"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", TURNED),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", HALVED),
        ("qwen3_moe", KEY, TURNED),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", CUT),
        ("qwen3_moe", "model.norm.weight", CUT),
    ],
)
def test_another_shape_is_refused_on_every_way_in(folders, tmp_path, family, key, change):
    plain, packed, adapter = (folders / family / name for name in ("plain", "packed", "adapter"))
    source, tensors = changed(plain, tmp_path / "plain", f"{key} ", change)
    shapes = tensors[key].shape, load_file(plain / "model.safetensors")[key].shape
    wrong, right = (re.escape(str(tuple(shape))) for shape in shapes)
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, tmp_path / "out", NF4),
        lambda: verify(packed, against=source),
        lambda: moe_qlora.merge_adapter(source, adapter, tmp_path / "out"),
        *([lambda: loaded(source, NF4, dtype="auto")] if key == KEY else []),
    ):
        with pytest.raises(CheckpointError, match=f"{re.escape(key)} .*{wrong}.*{right}"):
            way()
        assert not (tmp_path / "out").exists()
    # Packed weights are named by one sentence; transformers refuses others itself, from 5.23 on.
    fault, said = (CheckpointError, key) if "proj" in key else (RuntimeError, "above report")
    if "proj" in key or TRANSFORMERS >= (5, 23):
        with pytest.raises(fault, match=re.escape(said)):
            loaded(source, NF4, dtype="auto")


def filled(value: float) -> Change:
    return lambda tensors, key: tensors[key].fill_(value)


def poisoned(value: float) -> Change:
    return lambda tensors, key: tensors[key][3, 5:6].fill_(value)


def cast(dtype: torch.dtype, scale: float = 1.0) -> Change:
    """Codes of another tool."""
    return lambda tensors, key: tensors.update(
        {key: tensors[key].to(dtype), f"{key}_scale_inv": torch.full((1, 1), scale)}
    )


def coded(tensors: dict[str, Tensor], key: str) -> None:
    cast(FP8)(tensors, key)
    tensors[key].view(torch.uint8)[1, 2] = 0x7F  # NaN


def blocks(tensors: dict[str, Tensor], key: str) -> None:
    experts, inner, out = tensors.pop(key).shape
    codes = torch.zeros(experts, out, max(inner // 32, 1), 16, dtype=torch.uint8)
    tensors |= {f"{key}_blocks": codes, f"{key}_scales": codes[..., 0].clone()}


lost: Change = lambda tensors, key: tensors.pop(key)  # noqa: E731
EXPERT, NONE, DOWN = ".0.mlp.experts.1.", "_proj holds NaN or inf in row 1", r"experts\.down_proj"
UNSAID = r"\S* is (float8_e4m3fn|uint8)\b.*config\.json has no quantization_config"
NAMED, ODD, ENDLESS = CheckpointError, UnsupportedWeightError, NonFiniteWeightError
BAD: dict[str, tuple[str, Change, type[Exception], str]] = {
    "nan": (f"{EXPERT}up", filled(NAN), ENDLESS, f"gate_up{NONE}"),
    # bitsandbytes would spread one NaN over the whole weight, through the mean of its absmax
    "layer": (KEY, poisoned(NAN), ENDLESS, re.escape(KEY)),
    "int8 layer": (KEY, poisoned(-INF), ENDLESS, re.escape(KEY)),
    "fp8: code": (KEY, coded, ENDLESS, re.escape(KEY)),
    "shape": (f"{EXPERT}down", made(lambda weight: weight[:, :-8]), NAMED, DOWN),
    "none": ("down_proj", lost, NAMED, DOWN),
    # of which the floating-point other half would make a weight
    "int8 half": (f"{EXPERT}up", made(Tensor.char), ODD, "gate_up_proj is int8 in the checkpoint"),
    "int8": ("q_proj", cast(torch.int8), ODD, r"q_proj\S* is int8.*another tool"),
    "fp8 router": ("mlp.gate.", cast(FP8), NAMED, r"mlp\.gate" + UNSAID),
    "fused: mxfp4": ("experts.down_proj ", blocks, NAMED, "down_proj_blocks" + UNSAID),
}


@pytest.mark.parametrize("case", BAD)
def test_a_source_that_cannot_be_packed_is_named_on_both_ways(folders, tmp_path, case):
    part, change, error, said = BAD[case]
    family = "gpt_oss" if case.startswith("fused") else "qwen3_moe"
    source, _ = changed(folders / family / "plain", tmp_path / "plain", part, change)
    if case.startswith("fp8: "):
        maker = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        set_json(source / "config.json", quantization_config=maker)
    settings = {"load_in_8bit": True} if case == "int8 layer" else NF4
    for way in (
        lambda: moe_qlora.quantize_checkpoint(source, tmp_path / "out", settings),
        lambda: loaded(source, settings, dtype="auto", ignore_mismatched_sizes=True),
    ):
        with pytest.raises(error, match=said):
            way()
    assert not (tmp_path / "out").exists()
