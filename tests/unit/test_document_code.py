"""The Python of the documents: it runs on a tiny model, or its names are those of the libraries.

The blocks of a page run in order, as one script, in a folder that holds a tiny model under the name
that the pages give theirs. A block under `<!-- not run: the reason -->` needs a GPU, a server or
several processes; it is compiled, and what it takes from other modules must be there, with the
keyword arguments that it passes.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import moe_qlora
from moe_qlora.testing import tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "moe_qlora/docs").glob("*.md"))]
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",  # the folder that quickstart.md downloads it to
    "qwen3-30b-a3b": "Qwen3-30B-A3B",  # its plan takes seconds
    "SFTConfig(": "SFTConfig(use_cpu=not torch.cuda.is_available(), ",  # it asks for bf16 on a GPU
}
NEEDS = {"trainers.md": ("datasets", "trl")}

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\n)?```python\n(?P<code>.+?)```", re.DOTALL
)


def blocks(file: Path) -> list[tuple[str | None, str, int]]:
    """Each block of Python: why it is not run, its code, and the line that it starts in."""
    text = file.read_text(encoding="utf-8")
    return [
        (found["reason"], found["code"], text[: found.start("code")].count("\n") + 1)
        for found in BLOCK.finditer(text)
    ]


def with_code(*, run: bool) -> list[Path]:
    return [file for file in FILES if any((why is None) == run for why, _, _ in blocks(file))]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model in it, as the current one; the switch is off afterwards."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "Qwen3-30B-A3B"
    words = ["<unk>", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<unk>", "eos_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    moe_qlora.disable()
    moe_qlora.set_workspace_cap(None)


def run(file: Path, folder: Path) -> dict[str, Any]:
    """Run a page's blocks as one script, in which each has the lines that it has in the page."""
    script = ""
    for why, code, line in blocks(file):
        if why is None:
            script += "\n" * (line - 1 - script.count("\n")) + code
    for name, stand_in in STAND_INS.items():
        script = script.replace(name, stand_in)
    (folder / "page.py").write_text(script, encoding="utf-8")
    return runpy.run_path(str(folder / "page.py"))


@pytest.mark.filterwarnings("ignore")  # of the libraries that pages call
@pytest.mark.parametrize("file", with_code(run=True), ids=lambda file: file.name)
def test_pages_run(file, here):
    for package in NEEDS.get(file.name, ()):
        pytest.importorskip(package)
    space = run(file, here)
    if file.name == "README.md":  # LoRA trains on attention and experts
        model = space["model"]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        model(**tiny_inputs(model.get_base_model())).logits.sum().backward()
        factors = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n}
        assert any("experts" in name for name in factors)
        assert all(grad is not None and grad.any() for grad in factors.values())


@pytest.mark.parametrize("file", with_code(run=False), ids=lambda file: file.name)
def test_names_of_what_is_not_run(file):
    for why, code, line in blocks(file):
        if why is None:
            continue
        wrong = unknown_names(code)
        assert not wrong, f"{file.name}, line {line}: {wrong}"


def unknown_names(code: str) -> list[str]:
    """What a block imports or takes from moe_qlora and is not there, and its wrong arguments."""
    tree, wrong, known = ast.parse(code), [], {"moe_qlora": moe_qlora}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and find_spec(str(node.module).split(".")[0]):
            module = import_module(str(node.module))
            wrong += [a.name for a in node.names if not hasattr(module, a.name)]
            known |= {a.name: getattr(module, a.name, None) for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "moe_qlora":
            wrong += [node.attr] * (not hasattr(moe_qlora, node.attr))
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            function = reduce(
                lambda owner, name: getattr(owner, name, None), rest, known.get(first)
            )
            if callable(function):
                takes = inspect.signature(function).parameters
                if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                    wrong += [f"{k.arg}=" for k in node.keywords if k.arg and k.arg not in takes]
    return wrong
