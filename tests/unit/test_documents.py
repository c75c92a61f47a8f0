"""The documents: links lead somewhere; files, names, options and messages they name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import moe_qlora
from moe_qlora.cli.app import app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_qlora"
README, PAGES = ROOT / "README.md", PACKAGE / "docs"
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *PACKAGE.rglob("*.md"), *ROOT.glob("tools/**/*.md")]
)
SITE = ROOT / "tools/docs/mkdocs.yml"

documents = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def anchors_of(file: Path) -> set[str]:
    """What a link can name after `#`: GitHub's form of each heading."""
    headings = re.findall(r"^#+ (.+)$", text_of(file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_cells(table: str) -> list[str]:
    """The first cell of each row of a table, without its two lines of heading."""
    return [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]


@documents
def test_links_lead_somewhere(file):
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(file)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        exists = there.is_relative_to(ROOT) and there.exists()
        if not exists or (anchor and anchor not in anchors_of(there)):
            bad.append(target)
    assert not bad, bad


@documents
def test_files_that_are_named_exist(file):
    named = re.findall(r"(?<![\w/.-])(?:moe_qlora|tools|tests)/[\w./-]*\w", text_of(file))
    bad = sorted({name for name in named if not (ROOT / name).exists()})
    assert not bad, bad


def test_every_page_is_in_the_index_and_on_the_site():
    pages = {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    linked = set(re.findall(r"\]\(([\w-]+\.md)", text_of(PAGES / "index.md")))
    assert pages <= linked
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
    bad = []
    for name, *words in commands_of(file):
        if name.startswith("-"):
            words, options = [name, *words], {"--install-completion", "--show-completion", "--help"}
        elif name in group.commands:
            known = group.commands[name].params
            options = {flag for one in known for flag in (*one.opts, *one.secondary_opts)}
            options.add("--help")
        else:
            bad.append(name)
            continue
        flags = [word.strip("[]").split("=")[0] for word in words]
        bad += [f"{name} {flag}" for flag in flags if flag[:1] == "-" and flag not in options]
    assert not bad, bad


def test_the_page_of_names_has_what_is_public():
    rows = re.findall(r"^\| (`.+?) \|", text_of(PAGES / "reference.md"), re.MULTILINE)
    cells = " ".join(rows)
    named = re.findall(r"`(\w+)", cells)
    assert len(named) == len(set(named))
    assert set(moe_qlora.__all__) == set(named)


def test_the_glossary_has_the_words_in_use():
    """Each term once, in alphabetical order, and in the package or its pages."""
    table = text_of(PAGES / "contributing.md").partition("## Glossary")[2]
    terms = [cell.strip() for cell in first_cells(table)]
    assert len(terms) >= 40
    assert terms == sorted(set(terms), key=str.lower)
    words = [part for term in terms for part in term.split(", ")]
    texts = [text_of(file) for file in PACKAGE.rglob("*.py")]
    texts += [text_of(file) for file in PAGES.glob("*.md") if file.name != "contributing.md"]
    used = " ".join(" ".join(texts).split()).lower()
    assert not [word for word in words if word.lower() not in used]


def messages() -> list[str]:
    """Every string of the package, with {} for what is put in."""
    strings = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
                strings.append("".join(map(str, parts)))
    return strings


def test_messages_under_troubleshooting_are_real():
    known = "\n".join(messages())
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", text_of(PAGES / "troubleshooting.md"))
    assert len(quoted) > 20
    bad = [words for words in quoted if words not in known and words != "CUDA out of memory"]
    assert not bad, bad
