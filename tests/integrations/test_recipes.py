"""The recipes of tools/recipes, as they are, on tiny models and the CPU, in one process."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moe_qlora
from moe_qlora.packing import parametrize

FOLDER = Path(__file__).parents[2] / "tools/recipes"
MOST_LINES = 80
STEPS = 2

spec = importlib.util.spec_from_file_location("run_all", FOLDER / "run_all.py")
run_all = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run_all  # dataclasses look there
spec.loader.exec_module(run_all)

pytestmark = [
    pytest.mark.usefixtures("trainable_linears", "quiet_loading", "switched_off"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries that recipes call
]


@pytest.fixture
def switched_off():
    yield
    moe_qlora.disable()


@pytest.fixture
def one_rank(monkeypatch):
    """The variables that torchrun sets for a single process, and no group afterwards."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": "29517"}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of each kind; models are written beside them when a recipe asks for one."""
    root = tmp_path_factory.mktemp("recipes")
    for kind, make in run_all.DATA.items():
        lines = [json.dumps(make(i)) for i in range(20)]
        (root / f"{kind}.jsonl").write_text("\n".join(lines))
    return root


def run(name, folder, out, monkeypatch):
    """Run a recipe as `python tools/recipes/NAME.py` does, and return its variables."""
    recipe = run_all.RECIPES[name]
    model = folder / recipe.model
    if not model.exists():
        run_all.write_model(model, recipe.model, tiny=True)
    lengths = {"tasks": ["--length", "8"], "pairs": ["--seq", "48"], "text": ["--seq", "16"]}
    arguments = [str(folder / f"{recipe.data}.jsonl"), str(out), "--model", str(model)]
    monkeypatch.setattr(
        sys, "argv", [name, *arguments, *lengths[recipe.data], "--steps", str(STEPS)]
    )
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def factors(adapter, *, trained=True):
    """The names of the layers that a saved adapter is on; each was trained."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, value in tensors.items():
        if "lora_B" in key and trained:
            assert bool(value.any()), f"{key} was not trained"
    return {key.split(".lora_")[0].rpartition(".")[2] for key in tensors}


def test_every_recipe_is_short_and_run_here():
    scripts = {file.stem: file for file in FOLDER.glob("*.py")}
    assert set(scripts) - {"run_all", "loop", "sft"} == set(run_all.RECIPES)
    for name, file in scripts.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        assert name == "run_all" or len(lines) <= MOST_LINES, f"{name}: {len(lines)} lines"


@pytest.mark.parametrize("name", ["qwen3_24gb", "mixtral", "glm_air_80gb"])
def test_attention_and_experts(name, folder, tmp_path, monkeypatch):
    model = run(name, folder, tmp_path, monkeypatch)["model"]
    packed = list(parametrize.iter_packed(model))
    assert len(packed) == (2 if name == "glm_air_80gb" else 4)  # glm's first layer is dense
    kinds = {parametrize.read_packed(module, parameter).kind for _, module, parameter in packed}
    assert kinds == {"nf4"}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert factors(tmp_path) == attention | {"experts", "base_layer"}


def test_gpt_oss_keeps_the_codes_of_its_checkpoint(folder, tmp_path, monkeypatch):
    model = run("gpt_oss", folder, tmp_path, monkeypatch)["model"]
    stored = load_file(folder / "gpt_oss" / "model.safetensors")
    packed = list(parametrize.iter_packed(model))
    assert len(packed) == 4
    for owner, module, parameter in packed:
        weight = parametrize.read_packed(module, parameter)
        assert weight.kind == "mxfp4"
        key = f"{owner}.{parameter}_blocks".replace("base_model.model.", "")
        blocks = stored[key.replace(".base_layer", "")]
        swapped = (blocks << 4) | (blocks >> 4)
        assert torch.equal(weight.codes.flatten(), swapped.flatten())
    assert {"experts", "base_layer", "q_proj"} <= factors(tmp_path)


def test_deepseek_adapts_latent_attention_and_shared_experts(folder, tmp_path, monkeypatch):
    run("deepseek", folder, tmp_path, monkeypatch)
    names = factors(tmp_path)
    assert {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "experts", "base_layer"} <= names
    assert {"gate_proj", "up_proj", "down_proj"} <= names  # shared experts, the dense layer


def test_attention_or_experts(folder, tmp_path, monkeypatch, capsys):
    run("attention_or_experts", folder, tmp_path, monkeypatch)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert factors(tmp_path / "attention") == attention
    assert factors(tmp_path / "experts") == {"experts", "base_layer"}
    assert factors(tmp_path / "both") == attention | {"experts", "base_layer"}
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    (heading,) = (number for number, row in enumerate(table) if row[:2] == ["LoRA", "on"])
    nothing, *rows = table[heading + 1 : heading + 5]
    assert [row[0] for row in rows] == ["attention", "experts", "both"]
    before, attention, experts, both = (float(row[-1]) for row in (nothing, *rows))
    assert max(attention, both) < before < 8 and experts <= before
    trained = [int(row[2].replace(",", "")) for row in rows]
    assert trained[0] // 8 + trained[1] == trained[2]  # rank 64 on attention alone, else 8


def test_hot_experts(folder, tmp_path, monkeypatch):
    variables = run("hot_experts", folder, tmp_path, monkeypatch)
    hot, use = variables["hot"], variables["use"]
    assert [len(experts) for experts in hot.values()] == [1, 1]  # a quarter of 4
    for name, (expert,) in hot.items():
        assert use[name][expert] == use[name].max() > use[name].sum() / 4
    assert factors(tmp_path) == {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}
    for key, value in load_file(tmp_path / "adapter_model.safetensors").items():
        if "experts" in key and "lora_A" in key:
            (expert,) = hot[
                key.removeprefix("base_model.model.").partition(".experts")[0] + ".experts"
            ]
            assert value.view(4, 16, -1).any(2).any(1).nonzero().flatten().tolist() == [expert]


@pytest.mark.usefixtures("one_rank")
def test_two_gpus(folder, tmp_path, monkeypatch):
    run("two_gpus", folder, tmp_path, monkeypatch)
    assert factors(tmp_path) == {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_trl(name, folder, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    trainer = run(name, folder, tmp_path, monkeypatch)["trainer"]
    assert trainer.state.global_step == STEPS
    assert len(list(parametrize.iter_packed(trainer.model))) == 4
    names = factors(tmp_path, trained=name == "dpo")  # random text may all be rewarded alike
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}
