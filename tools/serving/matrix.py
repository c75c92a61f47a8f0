"""Runs tiny models through real servers, and writes which serve what was trained into a table.

    python tools/serving/matrix.py --python SERVERS --llama-cpp SOURCE [--write] [FAMILY ...]

SERVERS is the interpreter of an environment with vLLM and llama-cpp-python, SOURCE llama.cpp's
source folder; `bash tools/test_serving` makes both. For each family an adapter with random factors
on all experts and the attention goes to each server in three ways: exported, as PEFT saved it, and
merged. Exit code 1: a server that serving/servers.json names does not serve what was trained, or
its own loader expects another layout than the table says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.errors import MoeQloraError
from moe_qlora.serving import check
from moe_qlora.serving.export import layout_for
from moe_qlora.testing import tiny_model

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "moe_qlora" / "serving" / "README.md"
_TABLE = re.compile(r"(<!-- table: start -->\n).*?(<!-- table: end -->)", re.DOTALL)

_COMMON = {"initializer_range": 0.2, "max_position_embeddings": 128, "vocab_size": 320}
_WIDE = {**_COMMON, "hidden_size": 64, "head_dim": 32}  # vLLM has attention for heads of 32 on
_PLAIN = {**_COMMON, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
_LATENT = {**_COMMON, "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # as vLLM has it for CPUs
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_WIDE, "norm_topk_prob": True},  # as published; llama.cpp knows no other
    "qwen2_moe": _PLAIN,
    "mixtral": _WIDE,
    "olmoe": _PLAIN,
    "glm4_moe": _WIDE,
    "granitemoe": _PLAIN,
    "gpt_oss": _WIDE,
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_next": {**_WIDE, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
_DTYPES = {"qwen3_next": torch.bfloat16}  # the only one that vLLM's linear attention takes on CPUs
_ENGINES = ("vllm", "llama.cpp")
_WAYS = ("exported", "as PEFT saved it", "merged")
# of GLM, which its converter asks for
_SPECIAL = ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>"]
_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass
class Cell:
    """One family at one server in one way."""

    verdict: str
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict}{': ' if self.detail else ''}{self.detail}"


def main() -> int:
    """Run the families, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--llama-cpp", required=True)
    parser.add_argument("--sglang", help="Folder of SGLang's unpacked wheel.")
    parser.add_argument("--write", action="store_true", help=f"Write the table into {PAGE}.")
    parser.add_argument("--engine", choices=_ENGINES, action="append")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    faults: list[str] = []
    for family in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            made = _Family(family, work)
            if arguments.sglang:
                made.load_by_sglang(arguments.sglang, faults)
            for engine in arguments.engine or _ENGINES:
                cells = made.run(engine, arguments.python, arguments.llama_cpp, faults)
                for (_, way), cell in cells.items():
                    sys.stdout.write(f"{family:18} {engine:10} {way:18} {cell}\n")
                    sys.stdout.flush()
                if arguments.write:
                    _write(family, engine, cells)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return int(bool(faults))


class _Family:
    """A tiny base, an adapter in three forms, and the logprobs that are right."""

    def __init__(self, family: str, work: Path) -> None:
        self.family, self.work = family, work
        self.dtype = _DTYPES.get(family, torch.float32)
        self.base, self.saved, self.merged = work / "base", work / "saved", work / "merged"
        model: Any = tiny_model(family, **FAMILIES[family])
        model.to(self.dtype).save_pretrained(self.base)
        self.architecture = type(model).__name__
        _write_tokenizer(self.base)
        self._train()
        moe_qlora.merge_adapter(self.base, self.saved, self.merged)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(5, 300, (4, 16), generator=generator).tolist()
        self.ours = check.local_logprobs(self.base, self.saved, self.prompts, self.dtype, True)
        self.ours_merged = check.local_logprobs(self.merged, None, self.prompts, self.dtype, True)[
            0
        ]

    def _train(self) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(self.base)
        experts = [param.name for param in moe_qlora.detect(model)]
        leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        layers = sorted(leaves & _LAYERS)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=layers, target_parameters=experts)
        adapted = moe_qlora.get_peft_model(model, config, unpacked_ok=True)
        generator = torch.Generator().manual_seed(1)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                draw = torch.randn(weight.shape, generator=generator) * 0.15
                weight.data = draw.to(weight.dtype)
        adapted.save_pretrained(self.saved, save_embedding_layers=False)

    def run(
        self, engine: str, python: str, llama_cpp: str, faults: list[str]
    ) -> dict[tuple[str, str], Cell]:
        """Ask one server; what the table promises and it does not do goes to `faults`."""
        target = check.ENGINES[engine]
        exported = self.work / f"exported-{target}"
        cells: dict[tuple[str, str], Cell] = {}
        adapters = {"as PEFT saved it": self.saved}
        try:
            moe_qlora.export_adapter(self.saved, exported, base=self.base, target=target)
            adapters = {"exported": exported, **adapters}
            promised = True
        except MoeQloraError:
            cells[engine, "exported"] = Cell("merge", "")
            promised = False
        start = {"python": python, "llama_cpp": llama_cpp}
        results = self._ask(engine, self.base, list(adapters.values()), **start)
        for index, way in enumerate(adapters, 1):
            cells[engine, way] = self._judge(results, index, self.ours)
        merged = self._ask(engine, self.merged, [], **start)
        both = results
        if "runs" in merged and "runs" in results:
            both = {**results, "runs": [results["runs"][0], merged["runs"][0]]}
        elif "error" in merged:
            both = merged
        cells[engine, "merged"] = self._judge(both, 1, (self.ours[0], self.ours_merged))
        if promised and cells[engine, "exported"].verdict != "yes":
            faults.append(f"{self.family}: {engine} does not serve the exported adapter.")
        if engine == "vllm" and promised and "layout" in results:
            self._compare_layout(results["layout"], faults)
        return {key: cells[key] for key in ((engine, way) for way in _WAYS)}

    def load_by_sglang(self, source: str, faults: list[str]) -> None:
        """Have SGLang's own loader stack the exported adapter."""
        exported = self.work / "exported-sglang"
        moe_qlora.export_adapter(self.saved, exported, base=self.base, target="sglang")
        program = str(Path(__file__).with_name("sglang_loader.py"))
        call = [sys.executable, program, source, str(exported), str(self.base)]
        run = subprocess.run(call, capture_output=True, text=True, check=False)
        sys.stdout.write(f"{self.family:18} {run.stdout or run.stderr[-300:]}")
        if run.returncode:
            faults.append(f"{self.family}: SGLang's loader does not stack the exported adapter.")

    def _ask(
        self, engine: str, model: Path, adapters: list[Path], python: str, llama_cpp: str
    ) -> dict[str, Any]:
        work = Path(tempfile.mkdtemp(dir=self.work))
        (work / "gguf").mkdir()
        job = {
            "model": str(model),
            "adapters": list(map(str, adapters)),
            "prompts": self.prompts,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rank": 8,
            "mixed": False,
            "llama_cpp": llama_cpp,
            "work": str(work / "gguf"),
        }
        try:
            return check.run_worker(engine, job, work, python, 600)
        except MoeQloraError as error:
            return {"error": str(error)}

    def _judge(self, result: dict[str, Any], index: int, ours: Any) -> Cell:
        if "error" in result:
            return Cell("no", _short(result["error"]))
        runs = [result["runs"][0], result["runs"][index]]
        report = check.compare("", ours, {**result, "runs": runs})
        if report.verdict == "not loaded":
            return Cell("no", _short(report.refusal))
        difference = f"{report.error:.1g} of {report.effect:.2g}"
        return Cell("yes" if report.ok else report.verdict, difference)

    def _compare_layout(self, seen: dict[str, Any], faults: list[str]) -> None:
        """Compare what vLLM's own loader expects with the row of the table."""
        row = layout_for("vllm", self.architecture)
        names = [f"experts.0.{row.leaves[role]}" for role in ("gate", "down", "up") if row.leaves]
        if (seen["three_d"], seen["expert_names"]) != (row.fused, names):
            faults.append(f"{self.family}: vLLM expects {seen['three_d']}, {seen['expert_names']}.")


def _short(error: str) -> str:
    text = re.sub(r"/tmp/\S+", "...", error).replace("|", "/")
    text = re.sub(r"^.*?\.\.\.:? (?=\w+(Error|Exception))", "", text)
    text = re.sub(r"^((RuntimeError|ValueError|convert_\w+\.py): )+", "", text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _write_tokenizer(folder: Path) -> None:
    """Write a small byte-level tokenizer, which llama.cpp's converter asks for."""
    tokenizer = ByteLevelBPETokenizer()
    words = ["".join(chr(97 + (i * j) % 26) for j in range(1, 6)) for i in range(200)]
    tokenizer.train_from_iterator(words, vocab_size=310, show_progress=False)
    tokenizer.add_special_tokens(_SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)


def _write(family: str, engine: str, cells: dict[tuple[str, str], Cell]) -> None:
    """Put the cells among the results written before, and the table of all on the page."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    row = known.setdefault(family, {})
    row[engine] = {way: str(cell) for (_, way), cell in cells.items()}
    ordered = {name: known[name] for name in FAMILIES if name in known}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    table = _markdown(ordered)
    PAGE.write_text(_TABLE.sub(lambda m: m[1] + table + m[2], text), encoding="utf-8")


def _markdown(rows: dict[str, dict[str, dict[str, str]]]) -> str:
    columns = [(engine, way) for engine in _ENGINES for way in _WAYS]
    heads = " | ".join(f"{engine}, {way}" for engine, way in columns)
    lines = [f"| | {heads} |", "|---" * (len(columns) + 1) + "|"]
    for family, engines in rows.items():
        texts = [engines.get(engine, {}).get(way, "") for engine, way in columns]
        lines.append(f"| `{family}` | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
