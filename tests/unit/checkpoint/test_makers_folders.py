"""Packing, merging and verifying folders that their makers quantized, beside their 16-bit twins."""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import same, tensors
from prequantized import plain_config, write_case, write_folder, write_shards
from safetensors.torch import load_file
from small_models import fill
from torch import Tensor
from training import NF4
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

import moe_qlora
from moe_qlora.checkpoint.folder import INDEX
from moe_qlora.checkpoint.verify import verify
from moe_qlora.cli.app import app
from moe_qlora.detection.detect import detect
from moe_qlora.testing import tiny_inputs

# One of each way to be stored, and of each way from the files to parameters.
FEW = (
    *("deepseek_v3 fp8", "gpt_oss mxfp4", "deepseek_v3 int4", "qwen3_moe modelopt nvfp4"),
    "deepseek_v4 fp4",
)
SHARD = "40KB"


class Twins:
    """A folder as its maker quantized it, and the 16-bit folder that it stands for."""

    def __init__(self, root: Path, write: Callable[[Path], tuple[Path, dict[str, Tensor]]]) -> None:
        self.makers, self.tensors = write(root / "makers")
        self.plain, self.root = root / "plain", root
        no_weights = shutil.ignore_patterns("*.safetensors*", "config.json")
        shutil.copytree(self.makers, self.plain, ignore=no_weights)
        write_shards(self.plain, self.tensors)
        set_config(self.plain, plain_config(self.makers))


Get = Callable[[str], Twins]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Get:
    root = tmp_path_factory.mktemp("twins")

    @functools.cache
    def get(name: str) -> Twins:
        place = root / name.replace(" ", "_")
        place.mkdir()
        return Twins(place, lambda path: write_case(path, name))

    return get


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def set_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pack(source: Path, out: Path, config: dict[str, Any] = NF4, **settings: Any) -> dict[str, Any]:
    """Pack a folder; return what tells it from others: its id, and its configuration."""
    manifest = moe_qlora.quantize_checkpoint(source, out, config, device="cpu", **settings)
    return {"id": manifest.id, "config": manifest.config, "experts": manifest.experts}


def assert_same_merges(left: Path, right: Path, adapter: Path, root: Path) -> dict[str, Tensor]:
    """Merge into both, compare, and return the tensors; the folders are `merged`, `expected`."""
    for base, name in ((left, "merged"), (right, "expected")):
        report = moe_qlora.merge_adapter(base, adapter, root / name, max_shard_size=SHARD)
        assert bool(report.dequantized) is (base == left)
        assert ("all of it is written dequantized" in str(report)) is (base == left)
    found, expected = tensors(root / "merged"), tensors(root / "expected")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert same(tensor, expected[key]), key
    configs = [config_of(root / name) for name in ("merged", "expected")]
    assert configs[0] == configs[1] and "quantization_config" not in json.dumps(configs)
    return found


def test_a_model_of_images_whose_text_model_says_it(tmp_path: Path) -> None:
    kept = ["visual", "model.visual"]

    def write(path: Path) -> tuple[Path, dict[str, Tensor]]:
        folder, plain = write_folder(path, "glm4v_moe", "fp8", modules_to_not_convert=kept)
        config = config_of(folder)
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        return set_config(folder, config), plain

    twins = Twins(tmp_path, write)
    assert pack(twins.makers, tmp_path / "a") == pack(twins.plain, tmp_path / "b")
    adapter = adapt(twins, AutoModelForImageTextToText)
    assert_same_merges(twins.makers, twins.plain, adapter, tmp_path)
    said = CliRunner().invoke(app, ["dump", str(twins.makers), "--json"])
    assert any("is quantized with fp8" in note for note in json.loads(said.stdout)["notes"])


def adapt(folder: Twins, auto: Any = AutoModelForCausalLM) -> Path:
    """A random adapter on experts and one kind of Linear layer, trained by nobody."""
    out = folder.root / "adapter"
    if not out.exists():
        model: Any = auto.from_pretrained(folder.plain)
        leaves = sorted({param.parameter_name for param in detect(model).experts})
        targets = ["o_proj", "o_b_proj"]
        config: Any = peft.LoraConfig(r=2, target_modules=targets, target_parameters=leaves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fill(peft.get_peft_model(model, config), 3, 0.1).save_pretrained(out)
    return out


@pytest.mark.parametrize("name", FEW)
def test_a_merge_equals_that_into_the_plain_folder(name: str, twins: Get, tmp_path: Path) -> None:
    folder, out = twins(name), tmp_path / "merged"
    found = assert_same_merges(folder.makers, folder.plain, adapt(folder), tmp_path)
    assert found.keys() == folder.tensors.keys()  # none of the makers' scales
    changed = {key for key, tensor in found.items() if not same(tensor, folder.tensors[key])}
    assert 0 < len(changed) < len(found)
    index = json.loads((out / INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for held in map(load_file, files):
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 40_000
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "expected")
    assert not info["missing_keys"]
    assert model.dtype == torch.bfloat16
    assert not hasattr(model, "hf_quantizer")
    inputs = tiny_inputs(model)
    assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
    assert verify(out).good


def test_what_a_folder_is(twins: Get) -> None:
    folder = twins("deepseek_v3 fp8").makers
    raw = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    report = verify(folder)
    assert (report.good, report.kind, report.method) == (True, "plain", "fp8")
    assert (report.tensors, report.nbytes) == (len(raw), sum(t.nbytes for t in raw.values()))
    assert report.dequantized == sum(key.endswith("_scale_inv") for key in raw)
    line = " ".join(CliRunner().invoke(app, ["verify", str(folder)]).output.split())
    assert "is whole: quantized by its maker (fp8)" in line
