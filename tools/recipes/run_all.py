"""Run every recipe of this folder once, on models of full width with a few layers, made here.

    python tools/recipes/run_all.py                      on a GPU: a few minutes, no download
    python tools/recipes/run_all.py --only dpo,grpo
    python tools/recipes/run_all.py --tiny               on a CPU: tiny models, to see that it runs

Each recipe is a process of its own, as a user starts it. Weights are random, so only a falling loss
and what is saved say that it works: a line for each has the first and the last loss, the adapters
that were saved, and the seconds. The exit code is 1 where a recipe failed. Those for which a
package is missing are left out, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "bench"), str(HERE.parents[1])]  # for shapes.py, and for tools

SIZES = {
    "qwen3_moe": "qwen3-30b-a3b", "gpt_oss": "gpt-oss-20b", "glm4_moe": "glm-4.5-air",
}  # fmt: skip
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

LOSS = r"(?:(?<![a-z_])(?<!held-out )loss'?:? '?|^(?:nothing|both) .* )([\d.]+)"


@dataclass(frozen=True)
class Recipe:
    """How a recipe is run here.

    Attributes:
        model: Of `MODELS`.
        data: Of `DATA`.
        needs: Packages beside those of the project.
        launcher: What stands before the script, behind Python.
        arguments: Further ones.
    """

    model: str
    data: str = "text"
    needs: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("--seq", "512")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{gpus}")
RECIPES = {
    "qwen3_24gb": Recipe("qwen3_moe"),
    "gpt_oss": Recipe("gpt_oss"),
    "continued": Recipe("qwen3_moe"),
    "offload": Recipe("qwen3_moe"),
    "two_gpus": Recipe("glm4_moe", launcher=TORCHRUN),
    "chat": Recipe("qwen3_moe", "chats", ("trl", "datasets"), arguments=("--seq", "256")),
    "dpo": Recipe("qwen3_moe", "pairs", ("trl", "datasets")),
    "grpo": Recipe("qwen3_moe", "tasks", ("trl", "datasets"), arguments=("--length", "16")),
}
DATA: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda i: {"text": " ".join(WORDS[(i + j) % 10] for j in range(200))},
    "pairs": lambda i: {
        "prompt": f"After {WORDS[i % 10]} comes",
        "chosen": f" {WORDS[(i + 1) % 10]}",
        "rejected": f" {WORDS[(i + 5) % 10]}",
    },
    "chats": lambda i: {
        "messages": [
            {"role": "user", "content": f"After {WORDS[i % 10]} comes"},
            {"role": "assistant", "content": WORDS[(i + 1) % 10]},
        ]
    },
    "tasks": lambda i: {"prompt": f"After {WORDS[i % 10]} comes", "answer": WORDS[(i + 1) % 10]},
}


def main() -> int:
    options = _options()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for kind, make in DATA.items():
            lines = [json.dumps(make(i)) for i in range(60)]
            (folder / f"{kind}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        for name in options.only.split(",") if options.only else RECIPES:
            recipe = RECIPES[name]
            missing = [p for p in recipe.needs if importlib.util.find_spec(p) is None]
            if missing:
                rows.append((name, f"left out: {', '.join(missing)} not installed"))
            else:
                model = folder / recipe.model
                if not model.exists():
                    write_model(model, recipe.model, tiny=options.tiny)
                rows.append((name, run(name, recipe, folder, options)))
            print(f"{rows[-1][0]:22}{rows[-1][1]}", flush=True)
    return int(any(text.startswith("FAILED") for _, text in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="names of recipes, by comma")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a CPU")
    return parser.parse_args()


def run(name: str, recipe: Recipe, folder: Path, options: argparse.Namespace) -> str:
    """Run one recipe and say what came of it, in a line."""
    import torch

    gpus = str(max(1, min(2, torch.cuda.device_count())))
    arguments = recipe.arguments
    if options.tiny and "--seq" in arguments:
        arguments = ("--seq", "64")
    command = [
        sys.executable,
        *(part.format(gpus=gpus) for part in recipe.launcher),
        str(HERE / f"{name}.py"),
        *(str(folder / f"{recipe.data}.jsonl"), str(folder / "out" / name)),
        *("--model", str(folder / recipe.model), "--steps", "6", *arguments),
    ]
    paths = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    # Tiny tensors: several threads would do little but wait for each other.
    threads = "1" if options.tiny else str(len(os.sched_getaffinity(0)))
    environment = {
        "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive",
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths,
    }  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        return f"FAILED after {seconds:.0f} s: {done.stdout[-800:]}\n{done.stderr[-3000:]}"
    losses = [float(value) for value in re.findall(LOSS, done.stdout, re.MULTILINE)]
    saved = len(list((folder / "out" / name).rglob("adapter_model.safetensors")))
    graphs = [line for line in done.stderr.splitlines() if "without CUDA graphs:" in line]
    first, last = (f"{losses[0]:.3f}", f"{losses[-1]:.3f}") if losses else ("", "")
    return f"loss {first} -> {last}, {saved} saved, {seconds:.0f} s {' '.join(graphs[:1])}"


def write_model(folder: Path, model_type: str, *, tiny: bool) -> None:
    """Save a random model of this type, and a tokenizer of bytes, as a checkpoint's folder."""
    import torch
    from shapes import whole_config, write_tokenizer
    from transformers import AutoModelForCausalLM

    from moe_qlora.testing import tiny_model
    from tools.corpus_entries import publish_mxfp4

    torch.manual_seed(0)
    model: Any
    if tiny:
        model = tiny_model(model_type, vocab_size=300)
    else:
        config = whole_config(SIZES[model_type], layers=2)
        config.vocab_size = 32768  # so that less is written and read
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1TB")
    write_tokenizer(folder)
    if model_type == "gpt_oss":
        publish_mxfp4(folder)


if __name__ == "__main__":
    sys.exit(main())
