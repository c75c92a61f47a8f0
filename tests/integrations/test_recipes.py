"""The recipes of tools/recipes, scripts and notebooks, as they are, on tiny models and the CPU."""

import json
import re
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
import trl
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model
from tools.bench.shapes import write_tokenizer
from tools.corpus_entries import publish_mxfp4

FOLDER = Path(__file__).parents[2] / "tools/recipes"
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}
STEPS = 2

MODELS = {"gpt_oss": "gpt_oss", "two_gpus": "glm4_moe"}  # Others: qwen3_moe
DATA = {"chat": "chats", "dpo": "pairs", "grpo": "tasks"}  # Others: text
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

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
    root, rows = tmp_path_factory.mktemp("recipes"), [row(number) for number in range(20)]
    for kind in rows[0]:
        lines = [json.dumps(each[kind]) for each in rows[: 3 if kind == "text" else 20]]
        (root / f"{kind}.jsonl").write_text("\n".join(lines))
    return root


def row(number):
    """A row of each kind of data."""
    asked, told, wrong = (WORDS[(number + further) % 10] for further in (0, 1, 5))
    prompt = f"After {asked} comes"
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": told}]
    return {
        "text": {"text": " ".join(WORDS[(number + i) % 10] for i in range(200))},
        "pairs": {"prompt": prompt, "chosen": f" {told}", "rejected": f" {wrong}"},
        "chats": {"messages": messages},
        "tasks": {"prompt": prompt, "answer": told},
    }


def model_of(model_type, folder):
    """The folder of a tiny model of this type, and of a tokenizer of bytes."""
    if not (to := folder / model_type).exists():
        tiny_model(model_type, vocab_size=300).save_pretrained(to)
        write_tokenizer(to)
        if model_type == "gpt_oss":
            publish_mxfp4(to)
    return to


LENGTHS = {"tasks": "--length 8", "pairs": "--seq 48", "text": "--seq 16", "chats": "--seq 64"}


def run_script(name, monkeypatch, *arguments):
    """Run a script as `python tools/recipes/NAME.py` does, and return its variables."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def run_notebook(name, monkeypatch, **settings):
    """Run a notebook's cells, the first with other settings, and return its variables."""
    monkeypatch.chdir(FOLDER)
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    first, *rest = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    changed = [f"{key} = {value!r}" for key, value in settings.items()]
    exec("\n".join([first, *changed, *rest]), found := {})  # noqa: S102 - the notebook's own code
    return found


def run(name, folder, out, monkeypatch, *more, model=None, steps=STEPS):
    """Run a recipe on data of its kind."""
    data = DATA.get(name, "text")
    model = model_of(MODELS.get(name, "qwen3_moe"), folder) if model is None else model
    arguments = [folder / f"{data}.jsonl", out, "--model", model]
    arguments += [*LENGTHS[data].split(), "--steps", steps]
    return run_script(name, monkeypatch, *arguments, *more)


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
    return {re.split(r"\.(?:lora_|token_adapter)", key)[0].rpartition(".")[2] for key in tensors}


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        *((name, "nf4", ALL) for name in ("qwen3_24gb", "offload")),
        ("continued", "nf4", ALL | {"embed_tokens", "lm_head"}),
        ("gpt_oss", "mxfp4", {"experts", "base_layer", "q_proj"}),  # The checkpoint's own codes
    ],
)
def test_attention_and_experts(name, kind, layers, folder, tmp_path, monkeypatch, evaluated):
    model = run(name, folder, tmp_path, monkeypatch)["model"]
    packed = [parametrize.read_packed(*found[1:]) for found in parametrize.iter_packed(model)]
    assert len(packed) == 4
    assert {weight.kind for weight in packed} == {kind}
    found = factors(tmp_path)
    assert found == ALL if layers is ALL else layers <= found
    assert evaluated() == (2 if name == "continued" else 3)  # before, and after each step


class PictureProcessor:
    """Qwen3-VL's processor as far as pictures go: its videos need torchvision."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        sizes = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
        self.pictures = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=sizes)

    def apply_chat_template(self, chat, **_):
        text, seen = "", []
        for message in chat:
            for part in message["content"]:
                if part["type"] == "image":
                    seen.append(self.pictures([part["image"]], return_tensors="pt"))
                    text += "<|image|>" * (int(seen[-1]["image_grid_thw"][0].prod()) // 4)
                else:
                    text += part["text"]
            text += "<|end|>"
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        image = self.tokenizer.convert_tokens_to_ids("<|image|>")
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == image).long()}
        keys = ("pixel_values", "image_grid_thw")
        return inputs | {key: torch.cat([one[key] for one in seen]) for key in keys}

    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)

    def decode(self, ids, **_):
        return self.tokenizer.decode(ids)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """The folder of a tiny Qwen3-VL-MoE, and a file of questions about pictures."""
    model = tmp_path / "model"
    tokenizer = write_tokenizer(model)
    tokenizer.add_tokens("<|image|>")
    tokenizer.save_pretrained(model)
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    vision, text = {"deepstack_visual_indexes": [0]}, {"vocab_size": 300}
    ids = {"image_token_id": image, "vision_start_token_id": 298, "video_token_id": 299}
    tiny_model("qwen3_vl_moe", text_config=text, vision_config=vision, **ids).save_pretrained(model)
    rows = [{"image": f"{i}.png", "question": "How red?", "answer": f" {i}"} for i in range(12)]
    for i, row in enumerate(rows):
        Image.new("RGB", (48, 48), (20 * i, 0, 0)).save(tmp_path / row["image"])
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", PictureProcessor)
    return str(model), str(data)


@pytest.mark.parametrize("form", ["script", "notebook"])
def test_vision(form, pictures, tmp_path, monkeypatch, evaluated):
    (folder, data), out = pictures, tmp_path / "out"
    if form == "script":
        options = ("--model", folder, "--seq", 64, "--steps", STEPS)
        found = run_script("vision", monkeypatch, data, out, *options)
        assert evaluated() == 3
    else:
        settings = {"MODEL": folder, "DATA": data, "OUT": str(out), "STEPS": STEPS}
        found = run_notebook("vision", monkeypatch, **settings)
    assert factors(out) == ALL
    model = found["model"]
    assert len(list(parametrize.iter_packed(model))) == 4
    tower = [m for n, m in model.named_modules() if ".visual." in n and isinstance(m, nn.Linear)]
    assert tower and {type(layer) for layer in tower} == {nn.Linear}
    row = json.loads(Path(data).read_text().splitlines()[-1])
    labels = found["collate"]([row])["labels"][0]
    assert found["processor"].tokenizer.decode(labels[labels >= 0]) == " 11<|end|>"


@pytest.mark.usefixtures("one_rank")
def test_two_gpus(folder, tmp_path, monkeypatch, evaluated):
    variables = run("two_gpus", folder, tmp_path, monkeypatch)
    assert factors(tmp_path) == ALL
    assert variables["after"] < variables["before"] < 8 and evaluated() == 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("arguments", [["loop"], ["loop", "--ddp"], ["sft", "--ddp"]])
def test_parallel(arguments, folder, tmp_path, monkeypatch, evaluated):
    name, *options = arguments
    run_script(name, monkeypatch, model_of("qwen3_moe", folder), tmp_path, *options)
    assert factors(tmp_path) == ALL
    assert evaluated() == (1 if name == "loop" else 2)


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_trl(name, folder, tmp_path, monkeypatch, evaluated):
    trainer = run(name, folder, tmp_path, monkeypatch)["trainer"]
    assert trainer.state.global_step == STEPS
    assert len(list(parametrize.iter_packed(trainer.model))) == 4
    # random text may all be rewarded alike
    assert factors(tmp_path, trained=name == "dpo") == ALL
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


@pytest.mark.parametrize("marks", [True, False])
def test_the_loss_of_chats_is_on_replies(marks, folder, tmp_path, monkeypatch):
    made = []

    def stop(self, **_):
        made.append(self)
        raise InterruptedError

    monkeypatch.setattr(trl.SFTTrainer, "train", stop)
    model = shutil.copytree(model_of("qwen3_moe", folder), tmp_path / "model")
    if not marks:
        template = model / "chat_template.jinja"
        template.write_text(re.sub("{% (end)?generation %}", "", template.read_text()))
    turns = [("user", "one"), ("assistant", "a b"), ("user", "two"), ("assistant", "c d")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 11))
    with pytest.raises(InterruptedError):
        run("chat", tmp_path, tmp_path / "out", monkeypatch, "--seq", "128", model=model)
    (trainer,) = made
    rows = [[i for i in row["labels"] if i >= 0] for row in trainer.train_dataset]
    learned = set(map(trainer.processing_class.decode, rows))
    assert learned == ({"a b<|end|>c d<|end|>"} if marks else {"a b<|end|>", "c d<|end|>"})
    assert len(trainer.train_dataset) == (10 if marks else 20)
    assert len(trainer.eval_dataset) == (1 if marks else 2)


def test_the_quickstart_runs_from_plan_to_server(folder, tmp_path, monkeypatch, capsys):
    model, out = str(model_of("olmoe", folder)), tmp_path / "out"
    run_notebook("quickstart", monkeypatch, MODEL=model, OUT=str(out), SEQ=512, STEPS=4)
    text = capsys.readouterr().out
    assert "Fits 12GiB: True" in text
    assert "model.layers.0.mlp.experts.gate_up_proj: nf4, (4, 192, 64)" in text
    losses = re.search(r"Loss on the held-out replies: ([\d. ]+)", text)[1].split()
    assert len(losses) == 2 and float(losses[1]) < float(losses[0])
    assert factors(out / "adapter") == ALL
    assert "loss" in (out / "report.html").read_text().lower()
    assert f"chat={out}/vllm" in text and f"vllm serve {out}/merged" in text
    before = load_file(Path(model) / "model.safetensors")
    after = load_file(out / "merged/model.safetensors")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    expected = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    assert {key.split(".")[-2] for key in changed} == set(expected.split())
