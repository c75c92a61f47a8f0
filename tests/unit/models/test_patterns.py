"""Regular expressions of files that would run for ever: one sentence, on every way in."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import CheckpointError
from moe_qlora.models import files
from moe_qlora.models.files import check_patterns
from moe_qlora.testing import tiny_model

NAMES = [f"model.layers.{layer}.self_attn.k_proj" for layer in range(4)]
ENDLESS = r"(\w|\w\w|\.)*!"  # two letters of a name are matched in two ways
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 0.25)


@pytest.mark.parametrize("pattern", [ENDLESS, r"(\w+\.?)+X", r"((\w*)*\.)*z", ".*a" * 12 + "!"])
def test_endless_patterns_are_named(pattern):
    name = [*NAMES, "a" * 60]
    with pytest.raises(CheckpointError, match=r"config\.json has the pattern") as error:
        check_patterns(["k_proj", pattern], name, "config.json")
    assert pattern[:40] in str(error.value).replace("\\\\", "\\")


@pytest.mark.parametrize(
    "pattern",
    [
        r"model(\.\w+)*\.k_proj",
        r".*layers\.(\d+)\.(self_attn|mlp)\.(q|k|v)_proj.*",
        "|".join(f"(?:.*\\.)?(m{n})" for n in range(500)),
        "((",  # its reader says what is wrong with it
        "re:.*experts.*",
    ],
)
def test_patterns_of_real_files_pass(pattern, monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 10.0)  # of a process that may start slowly
    check_patterns([pattern], NAMES, "config.json")


def test_a_pattern_of_a_megabyte_is_refused():
    with pytest.raises(CheckpointError, match="a pattern of 1,000,000 characters"):
        check_patterns(["a" * 10**6], NAMES, "config.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A 16-bit checkpoint, its packed folder and an adapter of it."""
    root = tmp_path_factory.mktemp("patterns")
    tiny_model("qwen3_moe").save_pretrained(root / "plain")
    with moe_qlora.enabled():
        model: Any = AutoModelForCausalLM.from_pretrained(
            root / "plain", quantization_config=BitsAndBytesConfig(**NF4)
        )
        model.save_pretrained(root / "packed")
    config = LoraConfig(r=2, target_modules=["v_proj"])
    moe_qlora.get_peft_model(model, config).save_pretrained(root / "adapter")
    return root


def changed(folder, out, file, **fields):
    shutil.copytree(folder, out)
    content = json.loads((out / file).read_text())
    for field, value in fields.items():
        place, _, last = field.rpartition("__")
        (content[place] if place else content)[last] = value
    (out / file).write_text(json.dumps(content))
    return out


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")
@pytest.mark.parametrize(
    ("field", "value", "ways"),
    [
        ("target_modules", ENDLESS, ("load", "merge", "export")),
        ("exclude_modules", ENDLESS, ("load", "merge")),
        ("rank_pattern", {ENDLESS: 4}, ("load", "export")),
        ("alpha_pattern", {ENDLESS: 4}, ("merge",)),
        ("layers_pattern", [ENDLESS], ("export",)),
    ],
)
def test_of_an_adapter(folders, tmp_path, field, value, ways):
    fields = {field: value, "layers_to_transform": [0]}
    bad = changed(folders / "adapter", tmp_path / "bad", "adapter_config.json", **fields)
    said = "adapter_config.json has the pattern"

    def load():
        with moe_qlora.enabled():
            model = AutoModelForCausalLM.from_pretrained(folders / "packed")
        moe_qlora.load_adapter(model, bad)

    def merge():
        moe_qlora.merge_adapter(folders / "plain", bad, tmp_path / "merged")

    def export():
        moe_qlora.export_adapter(bad, tmp_path / "out", base=folders / "plain", target="sglang")

    for way in ways:
        with pytest.raises(CheckpointError, match=said):
            {"load": load, "merge": merge, "export": export}[way]()


def test_of_a_makers_folder(folders, tmp_path):
    shutil.copytree(folders / "plain", tmp_path / "maker")
    settings = {"quant_method": "compressed-tensors", "ignore": [f"re:{ENDLESS}"]}
    write_config(tmp_path / "maker", settings)
    with pytest.raises(CheckpointError, match="quantization_config has the pattern"):
        moe_qlora.quantize_checkpoint(tmp_path / "maker", tmp_path / "out", NF4)
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": [ENDLESS]}
    write_config(tmp_path / "maker", fp8)
    file = tmp_path / "maker" / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if re.search("q_proj", key))
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{key}_scale_inv": torch.ones(1, 1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="quantization_config has the pattern"):
        moe_qlora.quantize_checkpoint(tmp_path / "maker", tmp_path / "out", NF4)


def write_config(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def test_of_a_packed_folder(folders, tmp_path):
    place = "quantization_config__llm_int8_skip_modules"
    bad = changed(folders / "packed", tmp_path / "bad", "config.json", **{place: [ENDLESS]})
    with moe_qlora.enabled(), pytest.raises(CheckpointError, match="llm_int8_skip_modules has"):
        AutoModelForCausalLM.from_pretrained(bad)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="an alarm is POSIX's")
def test_the_matching_process_ends_by_itself_where_its_parent_is_killed():
    task = json.dumps([[ENDLESS], ["k" * 200]])
    command = [sys.executable, "-I", "-c", files._MATCH, "1"]  # at most a second
    done = subprocess.run(command, input=task, text=True, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGALRM
