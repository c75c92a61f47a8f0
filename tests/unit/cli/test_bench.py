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

from moe_qlora.models import named
from moe_qlora.packing import parametrize
from moe_qlora.testing import fill_randomly, tiny_config, tiny_model

bench: Any = import_module("moe_qlora.cli.bench")  # the name of its command too
SHORT = ("--device", "cpu", "--seq", 16, "--steps", 1)
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about bases that are made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_experts_and_attention_are_trained_in_bfloat16(cli, folder, monkeypatch):
    seen = []
    seconds_of_steps = bench._seconds_of_steps

    def watched(model: Any, *given: Any) -> Any:
        trained = {
            name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad
        }
        attention = {name for name in trained if "self_attn" in name}
        packed = len(list(parametrize.iter_packed(model)))
        seen.append((packed, len(attention), len(trained - attention)))
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        assert dtypes == {torch.bfloat16}
        return seconds_of_steps(model, *given)

    monkeypatch.setattr(bench, "_seconds_of_steps", watched)
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
    assert float(row["tokens_per_second"]) > 0
    assert " tokens/s on cpu; layers: 2 keep" in out


def test_what_does_not_fit_is_a_sentence(cli, folder):
    code, out, err = cli("bench", folder, *SHORT, "--memory", "100KiB")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: memory") and err.count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "--memory is 'much'; give a size with its unit, such as 24GiB."),
        (["--layers", 9], "--layers is 9, and "),
        (["--device", "cuda"], "--device is cuda, and no CUDA device is here"),
        (["--device", "gpu"], "--device is 'gpu'; give cuda, cuda:1 or cpu."),
    ],
)
def test_wrong_arguments_are_one_sentence(cli, folder, arguments, message):
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is a CUDA device")
    code, out, err = cli("bench", folder, *SHORT, *arguments)
    assert (code, out) == (2, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_model_without_experts(cli, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(tmp_path / "dense")
    code, _, err = cli("bench", tmp_path / "dense", *SHORT)
    assert code == 2 and "has no fused expert weights, which bench would pack." in err


def test_layers_are_cut_with_their_lists(tmp_path):
    config = tiny_config("gpt_oss")
    source = bench.shortened(named.resolve(config), 1)
    assert source.config.num_hidden_layers == 1 and len(source.config.layer_types) == 1
    assert config.num_hidden_layers == 2 and source.config.dtype == torch.bfloat16
    nested = bench.shortened(named.resolve(tiny_config("qwen3_vl_moe")), 1)
    assert nested.config.get_text_config().num_hidden_layers == 1


def test_random_weights_are_transformers_own():
    """Each tensor is as widely spread as where transformers builds the model on the CPU."""
    config = tiny_config("qwen3_moe", num_hidden_layers=1)
    right = type(tiny_model("qwen3_moe"))._from_config(config)
    with torch.device("meta"):
        model = type(right)._from_config(config)
    seen = []
    filled = fill_randomly(model, torch.device("cpu"), lambda name, _: seen.append(name))
    assert filled is model and sorted(seen) == sorted(n for n, _ in model.named_modules())
    for name, wanted in (dict(right.named_parameters()) | dict(right.named_buffers())).items():
        found = model.get_parameter(name) if name in dict(model.named_parameters()) else None
        found = model.get_buffer(name) if found is None else found
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        if wanted.numel() > 1000:
            spread = wanted.float().std().item()
            assert found.float().std().item() == pytest.approx(spread, rel=0.2), name
        elif wanted.float().std() == 0:
            torch.testing.assert_close(found, wanted)
