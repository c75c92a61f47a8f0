"""The recipes of tools/recipes, as they are, on tiny models and the CPU.

Scripts run in this process, the notebook in a kernel of its own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

import moe_qlora
from moe_qlora.packing import parametrize

FOLDER = Path(__file__).parents[2] / "tools/recipes"
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}
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
    for name, value in {**variables, "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of each kind; models are written beside them when a recipe asks for one."""
    root = tmp_path_factory.mktemp("recipes")
    for kind, make in run_all.DATA.items():
        lines = [json.dumps(make(i)) for i in range(3 if kind == "text" else 20)]
        (root / f"{kind}.jsonl").write_text("\n".join(lines))
    return root


def model_of(kind, folder):
    """The folder of a tiny model of this kind, made on first use."""
    model = folder / kind
    if not model.exists():
        run_all.write_model(model, kind, tiny=True)
    return model


LENGTHS = {
    "tasks": ["--length", "8"],
    "pairs": ["--seq", "48"],
    "text": ["--seq", "16"],
    "chats": ["--seq", "64"],
}


def run(name, folder, out, monkeypatch, *more, model=None, steps=STEPS):
    """Run a recipe as `python tools/recipes/NAME.py` does, and return its variables."""
    recipe = run_all.RECIPES[name]
    model = model_of(recipe.model, folder) if model is None else model
    arguments = [str(folder / f"{recipe.data}.jsonl"), str(out), "--model", str(model)]
    arguments += [*LENGTHS[recipe.data], "--steps", str(steps), *more]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.fixture
def evaluated(capsys):
    """A function: how many held-out losses a recipe has printed."""
    return lambda: len(re.findall(r"eval_loss|held-out loss", capsys.readouterr().out))


def factors(adapter, *, trained=True):
    """The names of the layers that a saved adapter is on; each was trained."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, value in tensors.items():
        if "lora_B" in key and trained:
            assert bool(value.any()), f"{key} was not trained"
    return {key.split(".lora_")[0].rpartition(".")[2] for key in tensors}


LATENT = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "experts", "base_layer"}
SHARED = {"gate_proj", "up_proj", "down_proj"}  # of shared experts, and of the dense layer


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        *((name, "nf4", ALL) for name in ("qwen3_24gb", "mixtral", "glm_air_80gb", "offload")),
        ("gpt_oss", "mxfp4", {"experts", "base_layer", "q_proj"}),  # The checkpoint's own codes
        ("deepseek", "nf4", LATENT | SHARED),
    ],
)
def test_attention_and_experts(name, kind, layers, folder, tmp_path, monkeypatch, evaluated):
    model = run(name, folder, tmp_path, monkeypatch)["model"]
    packed = [parametrize.read_packed(*found[1:]) for found in parametrize.iter_packed(model)]
    assert len(packed) == (2 if name == "glm_air_80gb" else 4)  # A dense layer first
    assert {weight.kind for weight in packed} == {kind}
    found = factors(tmp_path)
    assert found == ALL if layers is ALL else layers <= found
    assert evaluated() == 3  # before, at half of two steps, and after


@pytest.mark.usefixtures("one_rank")
def test_two_gpus(folder, tmp_path, monkeypatch, evaluated):
    variables = run("two_gpus", folder, tmp_path, monkeypatch)
    assert factors(tmp_path) == ALL
    assert variables["after"] < variables["before"] < 8 and evaluated() == 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("arguments", [["loop"], ["loop", "--ddp"], ["sft", "--ddp"]])
def test_parallel(arguments, folder, tmp_path, monkeypatch, evaluated):
    name, *options = arguments
    paths = [str(model_of("qwen3_moe", folder)), str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [name, *paths, *options])
    runpy.run_path(str(FOLDER / f"{name}.py"))
    assert factors(tmp_path) == ALL
    assert evaluated() == (1 if name == "loop" else 2)


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_trl(name, folder, tmp_path, monkeypatch, evaluated):
    trainer = run(name, folder, tmp_path, monkeypatch)["trainer"]
    assert trainer.state.global_step == STEPS
    assert len(list(parametrize.iter_packed(trainer.model))) == 4
    names = factors(tmp_path, trained=name == "dpo")  # random text may all be rewarded alike
    assert names == ALL
    assert evaluated() == (3 if name == "dpo" else 2)


def test_chat(folder, tmp_path, monkeypatch, evaluated, capsys):
    chat = partial(run, "chat", folder, tmp_path, monkeypatch, "--every", "1")
    variables = chat()
    assert variables["marked"] and factors(tmp_path) == ALL
    assert evaluated() == 4  # before, after each step, and the best at the end
    trainer = json.loads((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    assert trainer["global_step"] == STEPS
    with pytest.raises(SystemExit):
        chat()
    assert "holds checkpoints: add --resume" in capsys.readouterr().err
    reply = chat("--resume", steps=3)["reply"]
    assert len(reply) > 20
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    assert state["log_history"][: len(trainer["log_history"])] == trainer["log_history"]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("vllm serve ") and f"chat={tmp_path}/vllm" in line
    served = load_file(tmp_path / "vllm/adapter_model.safetensors")
    assert any(".experts.3.down_proj.lora_B" in key for key in served)


def notebook():
    return nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)


def test_the_notebook_runs_from_plan_to_server(folder, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # not the user's
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]), prepend=os.pathsep)
    book = notebook()
    (place,) = (
        i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", ())
    )
    model, out = str(model_of("olmoe", folder)), tmp_path / "out"
    settings = {"MODEL": model, "OUT": str(out), "SEQ": 512, "STEPS": 4}
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    book.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    text = "".join(
        output.text for cell in book.cells for output in cell.get("outputs", ()) if "text" in output
    )
    assert "Fits 12GiB: True" in text
    assert "model.layers.0.mlp.experts.gate_up_proj: nf4, (4, 192, 64)" in text
    losses = re.search(r"Loss on the held-out replies: ([\d. ]+)", text)[1].split()
    assert len(losses) == 2 and float(losses[1]) < float(losses[0])
    assert factors(out / "adapter") == ALL
    assert "loss" in (out / "report.html").read_text().lower()
    assert f"chat={out}/vllm" in text and f"vllm serve {out}/merged" in text
    before, after = (
        load_file(where / "model.safetensors") for where in (Path(model), out / "merged")
    )
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert {key.split(".")[-2] for key in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
