"""Run every recipe of this folder once, on models of full width with a few layers, made here.

    python tools/recipes/run_all.py                      on a GPU: a few minutes, no download
    python tools/recipes/run_all.py --only dpo,grpo
    python tools/recipes/run_all.py --tiny               on a CPU: tiny models, to see that it runs

Each recipe is a process of its own. Weights are random, so only a falling loss and what is saved
say that it works. The exit code is 1 where a recipe failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from shapes import whole_config, write_tokenizer
from transformers import AutoModelForCausalLM

from moe_qlora.testing import tiny_model
from tools.corpus_entries import publish_mxfp4

HERE = Path(__file__).resolve().parent
SIZES = {"qwen3_moe": "qwen3-30b-a3b", "gpt_oss": "gpt-oss-20b", "glm4_moe": "glm-4.5-air"}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LOSS = r"(?:(?<![a-z_])(?<!held-out )loss'?:? '?|^(?:nothing|both) .* )([\d.]+)"


class Recipe(NamedTuple):
    """A model type of `SIZES`, a kind of `row`, and further arguments."""

    model: str = "qwen3_moe"
    data: str = "text"
    arguments: tuple[str, str] = ("--seq", "512")


RECIPES = {
    "qwen3_24gb": Recipe(),
    "gpt_oss": Recipe("gpt_oss"),
    "continued": Recipe(),
    "offload": Recipe(),
    "two_gpus": Recipe("glm4_moe"),
    "chat": Recipe(data="chats", arguments=("--seq", "256")),
    "dpo": Recipe(data="pairs"),
    "grpo": Recipe(data="tasks", arguments=("--length", "16")),
}


def row(number: int) -> dict[str, dict[str, Any]]:
    """Return a row of each kind of data."""
    asked, told, wrong = (WORDS[(number + further) % 10] for further in (0, 1, 5))
    prompt = f"After {asked} comes"
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": told}]
    return {
        "text": {"text": " ".join(WORDS[(number + i) % 10] for i in range(200))},
        "pairs": {"prompt": prompt, "chosen": f" {told}", "rejected": f" {wrong}"},
        "chats": {"messages": messages},
        "tasks": {"prompt": prompt, "answer": told},
    }


def write_data(folder: Path, count: int) -> None:
    """Write a file of each kind of data."""
    for kind in row(0):
        lines = [json.dumps(row(number)[kind]) for number in range(count)]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def model_of(model_type: str, folder: Path, *, tiny: bool) -> Path:
    """Return the folder of a random model of this type, and of a tokenizer of bytes."""
    to: Path = folder / model_type
    model: Any
    if to.exists():
        return to
    torch.manual_seed(0)
    if tiny:
        model = tiny_model(model_type, vocab_size=300)
    else:
        config = whole_config(SIZES[model_type], layers=2)
        config.vocab_size = 32768  # so that less is written and read
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(to, max_shard_size="1TB")
    write_tokenizer(to)
    if model_type == "gpt_oss":
        publish_mxfp4(to)
    return to


def run(name: str, folder: Path, *, tiny: bool) -> str:
    """Run one recipe and say what came of it, in a line."""
    recipe, out, began = RECIPES[name], folder / "out" / name, time.perf_counter()
    gpus = str(max(1, min(2, torch.cuda.device_count())))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus]
    script = [*(launcher if name == "two_gpus" else []), HERE / f"{name}.py"]
    paths = [folder / f"{recipe.data}.jsonl", out, "--model", folder / recipe.model]
    more = ["--seq", "64"] if tiny and name != "grpo" else recipe.arguments
    command = [sys.executable, *script, *paths, "--steps", "6", *more]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    # Tiny tensors: several threads would do little but wait for each other.
    ours = {"OMP_NUM_THREADS": "1"} if tiny else {}
    env = {"OMP_WAIT_POLICY": "passive", **ours, **os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        return f"FAILED after {seconds:.0f} s: {done.stdout[-800:]}\n{done.stderr[-3000:]}"
    losses = re.findall(LOSS, done.stdout, re.MULTILINE) or ["", ""]
    saved = len(list(out.rglob("adapter_model.safetensors")))
    graphs = [line for line in done.stderr.splitlines() if "without CUDA graphs:" in line]
    told = f"loss {losses[0]} -> {losses[-1]}, {saved} saved, {seconds:.0f} s"
    return f"{told} {' '.join(graphs[:1])}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(RECIPES), help="names of recipes, by comma")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a CPU")
    options, code = parser.parse_args(), 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as root:
        write_data(Path(root), 60)
        for name in options.only.split(","):
            model_of(RECIPES[name].model, Path(root), tiny=options.tiny)
            said = run(name, Path(root), tiny=options.tiny)
            code |= said.startswith("FAILED")
            print(f"{name:22}{said}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
