"""What every command prints at 80 columns, kept in golden/; see conftest.py's --regenerate.

No file holds a version, a time or a temporary path: commands run in a folder of small models, with
packages and devices that are made up.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from peft import LoraConfig
from training import loaded
from transformers import LlamaConfig

import moe_qlora
from moe_qlora.cli import app
from moe_qlora.diagnosis import doctor
from moe_qlora.diagnosis.doctor import Package
from moe_qlora.kernels.cards import Card
from moe_qlora.testing import tiny_model
from moe_qlora.versions import release_of

GOLDEN = Path(__file__).parent / "golden"
HELP = ["", *(f"{command.__name__.replace('_', '-')} " for command in app.SUBCOMMANDS)]

CASES: dict[str, list[str]] = {
    **{f"help-{name.strip() or 'program'}": [f"{name}--help"] for name in HELP},
    "dump": ["dump model", "dump model --quant int8"],
    "dump-why": ["dump model --why"],
    "dump-long-names": ["dump vision"],
    "dump-peft": ["dump model --peft", "dump model --yaml"],
    "dump-no-experts": ["dump dense", "dump dense --peft"],
    "plan": ["plan model --seq 256"],
    "plan-fits": ["plan model --seq 256 --gpus 2x2GiB"],
    "plan-does-not-fit": ["plan model --seq 1024 --gpus 640MiB --no-checkpointing"],
    "plan-ranks": ["plan model --seq 256 --gpus 2x2GiB --fsdp 2"],
    "doctor": ["doctor"],
    "doctor-fast": ["doctor model --gpu H100"],
    "doctor-slow": ["doctor model --gpu T4", "doctor llama4_text --gpu 4090"],
    "quantize": ["quantize model new --quiet"],
    "verify": ["verify packed", "verify model", "verify packed --against model"],
    "verify-damaged": ["verify damaged"],
    "verify-refused": [
        *("verify missing", "verify model/model.safetensors", "verify empty"),
        *(f"verify {two}" for two in ("model --against model", "packed --against packed")),
        *(f"verify packed --against {name}" for name in ("missing", "other", "cut")),
    ],
    "merge": ["merge model adapter merged --quiet", "merge packed adapter merged --quiet"],
    "export": ["export adapter --base model --for peft -o exported"],
    "errors": [
        "dump qwen3_mo",
        "dump gone.json",
        "dump a/b/c",
        "dump a.YML",
        "dump model --quant nf5",
        "dump adapter",
        "verify adapter",
        "dump some/body",
        "dump dense/generation_config.json --json --yaml",
        "plan model --gpu 24GiB",
        "plan model --gpus 2xH10",
        "plan model --optimizer adam",
        "plan model --gpus 2x2GiB --fsdp 3",
        "plan model --gpus 2x2GiB --fsdp 2 --ddp",
        "plan model --rank 300000",
        "plan model --seq long",
        "plan train.yaml",
        "doctor train.yaml",
        "doctor --gpu 4091",
        "doctor --gpu 24GiB",
        "doctor --rank 0",
        "quantize model packed --quiet",
        "quantize packed new --quiet",
        "merge adapter model merged --quiet",
        "merge model packed merged --quiet",
        "dumb model",
        "dump",
    ],
}
MADE = ("new", "merged", "exported")  # folders that commands write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, the same packed and damaged, an adapter, and configurations of others."""
    root = tmp_path_factory.mktemp("golden")
    plain: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    for seed, weight in enumerate(plain.parameters()):  # alike with any transformers
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    plain.to(torch.bfloat16).save_pretrained(root / "model")
    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    packed = loaded(root / "model", asked, dtype="auto")
    packed.save_pretrained(root / "packed")
    shutil.copytree(root / "packed", root / "damaged")
    (shard,) = (root / "damaged").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    (root / "damaged/old.safetensors").write_bytes(b"")
    (root / "empty").mkdir()
    shutil.copytree(root / "model", root / "cut")
    (shard,) = (root / "cut").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    tiny_model("gpt_oss").save_pretrained(root / "other")
    lora = LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path="model")
    adapted = moe_qlora.get_peft_model(packed, lora, experts=True)
    adapted.save_pretrained(root / "adapter", save_embedding_layers=False)
    config = root / "adapter/adapter_config.json"
    config.write_text(config.read_text().replace(str(root / "model"), "model"))
    tiny_model("qwen3_vl_moe", dtype=torch.bfloat16).config.save_pretrained(root / "vision")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(root / "dense")
    return root


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Versions and devices that are the same on every machine."""
    rows = (
        Package("torch", "2.12.1", "2.11 to 2.13", "tested"),
        Package("transformers", "5.24.0", "5.20 to 5.23", "untested"),
        Package("triton", "3.6.0", "3.6 to 3.7", "tested"),
        Package("liger-kernel", "0.8.5", "0.8", "tested"),
        Package("deepspeed", None, "0.19", "not installed"),
    )
    card = Card("nvidia", (9, 0), 227 << 10)
    matmuls = ("quantized matmul", "grouped matmul")
    here = [(doctor.Device("NVIDIA H200", 150754820096, "9.0", True, *matmuls), card)]
    examined = doctor.examined
    monkeypatch.setattr(doctor, "packages", lambda: rows)
    monkeypatch.setattr(doctor, "examined", lambda gpu: here if gpu is None else examined(gpu))
    monkeypatch.setattr(doctor, "_DRIVER", folder / "none")
    monkeypatch.chdir(folder)


def plain(text: str, folder: Path) -> str:
    """A text without what differs from run to run, and without spaces at ends of lines."""
    text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    text = re.sub(r"( as \w+) \d+\.\d+\.\d+", r"\1 VERSION", text)
    text = re.sub(r"(moe_qlora|model)-[0-9a-f]{8,16}", r"\1-HASH", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_golden(case, cli, folder, steady, monkeypatch, request):
    if case.startswith("help") and release_of(typer.__version__) < (0, 29):
        pytest.skip("typer 0.29 writes help in another way")
    monkeypatch.setenv("COLUMNS", "80")
    shown = ""
    for line in CASES[case]:
        for name in MADE:
            shutil.rmtree(folder / name, ignore_errors=True)
        code, out, err = cli(*line.split())
        shown += f"$ moe-qlora {line}\n{plain(out, folder)}"
        shown += "".join(f"stderr: {each}\n" for each in plain(err, folder).splitlines())
        shown += f"[{code}]\n\n"
    file = GOLDEN / f"{case}.txt"
    if request.config.getoption("--regenerate"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8"), "see --regenerate"
