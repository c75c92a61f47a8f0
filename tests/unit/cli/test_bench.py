"""`moe-qlora bench` on a CPU: what it runs, what it prints, and how it says what cannot run."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_config

bench: Any = import_module("moe_qlora.cli.bench")  # the name of its command too
SHORT = ("--device", "cpu", "--seq", 16, "--steps", 1)
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about bases that are made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_experts_and_attention_are_trained_in_bfloat16(cli, folder, monkeypatch):
    seen = []
    steps = bench._steps

    def watched(model: Any, *given: Any) -> Any:
        trained = {
            name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad
        }
        attention = {name for name in trained if "self_attn" in name}
        packed = len(list(parametrize.iter_packed(model)))
        seen.append((packed, len(attention), len(trained - attention)))
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        assert dtypes == {torch.bfloat16}
        return steps(model, *given)

    monkeypatch.setattr(bench, "_steps", watched)
    code, out, err = cli("bench", folder, *SHORT, "--layers", 1, "--json")
    assert code == 0 and err.startswith("warning: The experts of 1 layer are packed")
    row = json.loads(out)
    assert seen == [(2, 4, 2)]  # packed weights; adapted layers of attention; adapted experts
    assert (row["model"], row["layers"], row["seq"], row["gpu"]) == ("tiny", 1, 16, "cpu")
    assert row["tokens_per_second"] > 0
    assert row["peak"] is None and row["torch"] == version("torch")
    assert "batches run as flat rows" in row["prepared"][0]


def test_the_last_two_lines_are_a_row(cli, folder):
    code, out, err = cli("bench", folder, *SHORT, "--memory", "1GiB")
    assert code == 0 and err.count("\n") == 1
    (row,) = csv.DictReader(out.splitlines()[-2:])
    assert row["setting"] == "2 keep, 0 part, 0 recompute" and row["memory"] == "1GiB"
    assert float(row["tokens_per_second"]) > 0 and row["peak"] == ""
    assert " tokens/s on cpu; layers: 2 keep" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "memory is 'much': 'much' is no size"),
        (["--memory", "100KiB"], "memory"),
        (["--layers", 9], "--layers is 9, and "),
        (["--device", "cuda"], "--device is cuda, and no CUDA device is here"),
        (["--device", "gpu"], "--device is 'gpu'; give cuda, cuda:1 or cpu."),
        ([], "dense has no fused expert weights, which bench would pack."),
    ],
)
def test_wrong_arguments_are_one_sentence(cli, folder, arguments, message):
    if not arguments:
        folder = folder.parent / "dense"
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(folder)
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is a CUDA device")
    code, out, err = cli("bench", folder, *SHORT, *arguments)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]
