"""The documents: links lead somewhere; files, names, options and messages they name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
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
MOST_WORDS = {README: 900}
MOST_WORDS_OF_A_PAGE = 2800
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
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [line.split("|")[1] for line in lines[2:]]


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


@documents
def test_pages_are_short(file):
    if file == README or file.parent == PAGES:
        assert len(text_of(file).split()) <= MOST_WORDS.get(file, MOST_WORDS_OF_A_PAGE)


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
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
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


def test_the_map_draws_the_house():
    """Its picture has the floors of tests/unit/test_house.py, its table every entry of the root."""
    house = ast.parse(text_of(ROOT / "tests/unit/test_house.py"))
    (floors,) = (
        ast.literal_eval(node.value)
        for node in house.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    chapter = text_of(PAGES / "architecture.md")
    picture = [line for line in chapter.splitlines() if re.match(r" {4}\w+ {2}", line)]
    drawn = [tuple(re.split(r" {2,}", line.strip())[:-1]) for line in picture]
    assert drawn == [tuple(room or "__init__" for room in floor) for floor in reversed(floors)]

    named = re.findall(r"`([^`]+)`", " ".join(first_cells(chapter)))
    entries = {f"{p.name}/" if p.is_dir() else p.name for p in PACKAGE.iterdir()}
    faces = {"__init__.py", "__init__.pyi"}
    assert set(named) == entries - faces - {"__pycache__/", "README.md", "py.typed", "docs/"}


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


def test_nobody_is_sent_to_a_registry_for_this_package():
    """It is on none; only the page about releases says how that changes."""
    sent = re.compile(r"(pip|uv|conda)3? (\w+ )*install[^\n`]*moe[-_]qlora")
    pages = [text_of(file) for file in DOCUMENTS if file.name != "RELEASING.md"]
    assert not [text for text in messages() + pages if sent.search(text)]
    assert sent.search("pip install -U moe-qlora")


# Each is a question, the heading under which the answer stands, and words of the answer. From the
# README it is one link to the page, or two by way of the index.
QUESTIONS = {
    "How much memory does Qwen3-30B-A3B take at 8,192 tokens?": (
        "memory.md", "Does it fit?", ["8,192 tokens", "39.4 GiB", "#what-fits"],
    ),
    "Does it train on an RTX 4090?": (
        "memory.md", "One card of 24 GB", ["4090", "qwen3_24gb.py"],
    ),
    "How do I train with FSDP2?": ("many-gpus.md", "FSDP2 and DDP", ["fully_shard(layer)"]),
    "What does `down_proj` in target_modules reach?": (
        "lora.md", "Names such as `down_proj`", ["modules only", "experts="],
    ),
    "How do I serve with vLLM?": (
        "quickstart.md", "Serve with vLLM", ["vllm serve", "--lora-modules", "moe-qlora export"],
    ),
    "Which versions are tested?": (
        "quickstart.md", "Versions", ["torch 2.11 to 2.15", "constraints.txt"],
    ),
    "My loss is NaN": ("troubleshooting.md", "My loss is NaN", ["bfloat16", "learning rate"]),
    "How do I resume?": ("saving.md", "Resuming", ["resume_from_checkpoint=True"]),
    "How do I use axolotl?": ("trainers.md", "axolotl", ["MoeQloraPlugin", "lora_experts"]),
    "The experts do not learn": (
        "troubleshooting.md", "Experts do not learn", ["experts=True", "moe_qlora.lora.inject"],
    ),
    "It is slow": ("speed.md", "Is it slow?", ["moe-qlora doctor", "compute_dtype"]),
}  # fmt: skip


def links_of(file: Path) -> set[tuple[Path, str]]:
    """The pages, with headings' anchors, that a page links to."""
    targets = (target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", text_of(file)))
    return {((file.parent / path).resolve(), anchor) for path, _, anchor in targets if path}


@pytest.mark.parametrize("question", QUESTIONS)
def test_two_clicks_from_the_readme_answer(question):
    name, heading, words = QUESTIONS[question]
    index, page = PAGES / "index.md", PAGES / name
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    assert index in {path for path, _ in links_of(README)}
    first = text_of(page).startswith(f"# {heading}\n")
    assert (page, "" if first else anchor) in links_of(index)
    parts = re.split(r"^#+ (.+)\n", without_code(page), flags=re.MULTILINE)
    answers = dict(zip(parts[1::2], parts[2::2], strict=True))
    for word in words:
        assert word in answers[heading], word


def without_code(file: Path) -> str:
    """A page whose code has no line that looks like a heading."""
    fence = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    return fence.sub(lambda code: code[0].replace("\n#", "\n ="), text_of(file))
