"""`moe-qlora bench` on a CPU: what it runs, what it prints, and how it says what cannot run."""

from __future__ import annotations

import csv
import json
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig

from moe_qlora.cli import measure
from moe_qlora.errors import ConfigError
from moe_qlora.models import named
from moe_qlora.packing import parametrize
from moe_qlora.testing import fill_randomly, tiny_config, tiny_model

SHORT = ("--device", "cpu", "--seq", 16, "--steps", 1)
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about bases that are made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_both_models_are_trained(cli, folder, monkeypatch):
    models = []
    trained = measure._trained

    def watched(model: Any, sizes: Any, setting: str) -> Any:
        found = trained(model, sizes, setting)
        packed = len(list(parametrize.iter_packed(model)))
        gets = {
            name.rpartition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad
        }
        attention = {name for name in gets if "self_attn" in name}
        models.append((packed, len(attention), len(gets - attention)))
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        assert dtypes == {torch.bfloat16}
        return found

    monkeypatch.setattr(measure, "_trained", watched)
    code, out, err = cli("bench", folder, *SHORT, "--layers", 1, "--json")
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert models == [(2, 4, 2), (0, 4, 0)]  # weights packed; layers of attention; experts
    assert (row["model"], row["layers"], row["seq"], row["gpu"]) == ("tiny", 1, 16, "cpu")
    assert row["tokens_per_second"] > 0 and row["bf16_tokens_per_second"] > 0
    assert row["peak"] is None and row["torch"] == version("torch")
    assert "batches run as flat rows" in row["prepared"][0]


def test_the_last_two_lines_are_a_row(cli, folder):
    code, out, err = cli("bench", folder, *SHORT, "--memory", "1GiB")
    assert (code, err) == (0, "")
    (row,) = csv.DictReader(out.splitlines()[-2:])
    assert row["setting"] == "2 keep, 0 part, 0 recompute" and row["memory"] == "1GiB"
    assert float(row["tokens_per_second"]) > 0 and row["bf16_setting"] == "all kept"
    assert "Training on cpu" in out and "bf16 experts, LoRA on attention" in out


def test_what_does_not_fit_is_a_sentence(cli, folder):
    code, out, err = cli("bench", folder, *SHORT, "--memory", "100KiB")
    assert (code, out) == (2, "")
    assert err.startswith("error: memory") and err.count("\n") == 1
    code, out, _ = cli("bench", folder, *SHORT, "--memory", "20MiB")  # plan reserves more
    assert code == 0 and "does not fit 20.0 MiB by plan" in out
    (row,) = csv.DictReader(out.splitlines()[-2:])
    assert row["bf16_tokens_per_second"] == "" and float(row["tokens_per_second"]) > 0


def test_experts_in_bfloat16_are_kept_or_computed_again_as_they_fit(folder, monkeypatch):
    source = measure.sized(named.resolve(folder), None)
    stock, peaks = measure.plan_settings, {}

    def plan(source: Any, packing: Any, asked: Any, gpus: int, **others: Any) -> Any:
        """The real plan, of a card that keeps nothing back."""
        key = asked["targets"], asked["checkpointing"]
        if key not in peaks:
            peaks[key] = stock(source, packing, asked, gpus=1 << 34, **others).peak.nbytes
        return SimpleNamespace(fits=peaks[key] <= gpus)

    def of(room: int) -> measure.Sizes:
        return measure.Sizes(256, 1, 1, f"{room}B", torch.device("cpu"))

    monkeypatch.setattr(measure, "plan_settings", plan)
    with pytest.raises(ConfigError, match=r"does not fit 1\.0 KiB by plan"):
        measure.frozen(source, of(1024))
    measure._fits(source, of(1024), named.build(source), 1024, packed=True, keeps=False)
    kept, again = peaks["attention", False], peaks["attention", True]
    assert kept > again and peaks.keys() >= {("attention,experts", True)}
    for room, setting in ((kept, "all kept"), (again, "all computed again")):
        assert measure.frozen(source, of(room)).setting == setting


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
    source = measure.sized(named.resolve(config), 1)
    assert source.config.num_hidden_layers == 1 and len(source.config.layer_types) == 1
    assert config.num_hidden_layers == 2 and source.config.dtype == torch.bfloat16
    nested = measure.sized(named.resolve(tiny_config("qwen3_vl_moe")), 1)
    assert nested.config.get_text_config().num_hidden_layers == 1


def test_the_model_beside_gets_every_setting_that_is_not_ours_alone(monkeypatch):
    pytest.importorskip("liger_kernel")
    asked = []

    @contextmanager
    def graph_layers(model: Any, **options: bool) -> Any:
        asked.append(options)
        yield

    monkeypatch.setattr("moe_qlora.speed.graphs.graph_layers", graph_layers)
    model: Any = tiny_model("qwen3_moe")
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with measure._quick(adapted, True):
        assert model.config._experts_implementation == "grouped_mm"
        assert model.forward.__module__.startswith("liger_kernel.")
    assert "forward" not in vars(model)
    assert asked == [{"compiled": True, "keep": True}]


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
