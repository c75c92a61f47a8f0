"""The documents: files, names and options that they name exist, and their Python runs."""

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

import moe_qlora
from moe_qlora.cli.app import app
from moe_qlora.testing import tiny_model
from tools.bench.shapes import write_tokenizer

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_qlora"
PAGES = PACKAGE / "docs"
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *PACKAGE.rglob("*.md"), *ROOT.glob("tools/**/*.md")]
)
SITE = ROOT / "tools/docs/mkdocs.yml"

documents = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@documents
def test_files_that_are_named_exist(file):
    """Links and headings are checked where the site is built, tools/docs/build."""
    named = re.findall(r"(?<![\w/.-])(?:moe_qlora|tools|tests)/[\w./-]*\w", text_of(file))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_page_is_in_the_index_and_on_the_site():
    pages = {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)", text_of(PAGES / "index.md")))
    leaves = re.findall(r"moe_qlora/docs/([\w-]+\.md)", str(yaml.safe_load(text_of(SITE))["nav"]))
    assert sorted(leaves) == sorted(pages | {"index.md"})


def commands_of(file: Path) -> Iterator[list[str]]:
    """The words of each `moe-qlora` command line of a document, in code."""
    code = re.findall(r"`(moe-qlora [^`]+)`", text_of(file))
    indented = re.findall(r"^ {4}(moe-qlora (?:.*\\\n)*.+)$", text_of(file), re.MULTILINE)
    for line in code + [re.split(r" {3,}|  #", line.replace("\\\n", " "))[0] for line in indented]:
        yield shlex.split(line)[1:]


@documents
def test_commands_and_options_exist(file):
    group: Any = typer.main.get_command(app)
    for words in commands_of(file):
        command = group if words[0].startswith("-") else group.commands[words[0]]
        known = {"--help", "--install-completion", "--show-completion"}
        known |= {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        assert {
            flag for word in words if (flag := word.strip("[]").split("=")[0])[:1] == "-"
        } <= known


def test_the_page_of_names_has_what_is_public():
    rows = re.findall(r"^\| (`.+?) \|", text_of(PAGES / "reference.md"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)", " ".join(rows))) == sorted(moe_qlora.__all__)


# The Python of the pages. The blocks of one run in order, as one script, in a folder that holds a
# tiny model under the name that the pages give theirs. Blocks under `<!-- not run: the reason -->`
# are compiled, and what they take from other modules must be there.
FILES = [ROOT / "README.md", *sorted(PAGES.glob("*.md"))]
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",  # the folder that quickstart.md downloads it to
    "qwen3-30b-a3b": "Qwen3-30B-A3B",  # its plan takes seconds
    "seq_len=8192": "seq_len=256",
    "seq_len=4096": "seq_len=64",
    "SFTConfig(": "SFTConfig(use_cpu=not torch.cuda.is_available(), ",  # it asks for bf16 on a GPU
}
NEEDS = {"trainers.md": ("datasets", "trl")}

BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?```python\n(.+?)```", re.DOTALL)


def blocks(file: Path) -> list[tuple[str | None, str, int]]:
    """Each block of Python: why it is not run, its code, and the line that it starts in."""
    text = text_of(file)
    return [(b[1], b[2], text[: b.start(2)].count("\n") + 1) for b in BLOCK.finditer(text)]


def with_code(*, run: bool) -> list[Path]:
    return [file for file in FILES if any((why is None) == run for why, _, _ in blocks(file))]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model in it, as the current one; the switch is off afterwards."""
    folder = tmp_path / "Qwen3-30B-A3B"
    tiny_model("qwen3_moe", dtype=torch.bfloat16, vocab_size=300).save_pretrained(folder)
    write_tokenizer(folder)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    moe_qlora.disable()
    moe_qlora.set_workspace_cap(None)


@pytest.mark.filterwarnings("ignore")  # of the libraries that pages call
@pytest.mark.parametrize("file", with_code(run=True), ids=lambda file: file.name)
def test_pages_run(file, here):
    for package in NEEDS.get(file.name, ()):
        pytest.importorskip(package)
    script = ""  # in which each block has the lines that it has in the page
    for why, code, line in blocks(file):
        if why is None:
            script += "\n" * (line - 1 - script.count("\n")) + code
    for name, stand_in in STAND_INS.items():
        script = script.replace(name, stand_in)
    (here / "page.py").write_text(script, encoding="utf-8")
    runpy.run_path(str(here / "page.py"))


@pytest.mark.parametrize("file", with_code(run=False), ids=lambda file: file.name)
def test_names_of_what_is_not_run(file):
    """What a block imports, or takes from moe_qlora, is there."""
    for code in (code for why, code, _ in blocks(file) if why is not None):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and find_spec(str(node.module).split(".")[0]):
                module = import_module(str(node.module))
                assert all(hasattr(module, each.name) for each in node.names), code
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "moe_qlora":
                assert hasattr(moe_qlora, node.attr), code
