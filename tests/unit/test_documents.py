"""The documents: links lead somewhere, files and messages they name exist, the recipe runs."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch

import moe_qlora
from moe_qlora.testing import tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_qlora"
README, GUIDE = ROOT / "README.md", PACKAGE / "README.md"
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *PACKAGE.rglob("*.md"), *ROOT.glob("tools/**/*.md")]
)
MOST_WORDS = 900

documents = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: str(f.relative_to(ROOT)))


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def anchors_of(file: Path) -> set[str]:
    """What a link can name after `#`: GitHub's form of each heading."""
    headings = re.findall(r"^#+ (.+)$", text_of(file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(file: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    parts = re.split(r"^## (.+)\n", text_of(file), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


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


def test_the_readme_is_short():
    assert len(text_of(README).split()) <= MOST_WORDS


def test_the_guide_names_what_is_public():
    cells = " ".join(first_cells(section(GUIDE, "Public names")))
    named = re.findall(r"`(\w+)", cells)
    assert len(named) == len(set(named))
    assert set(moe_qlora.__all__) == set(named)


def test_the_guide_draws_the_house():
    """Its picture has the floors of tests/unit/test_house.py, its table every entry of the root."""
    house = ast.parse(text_of(ROOT / "tests/unit/test_house.py"))
    (floors,) = (
        ast.literal_eval(node.value)
        for node in house.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    chapter = section(GUIDE, "Map of the code")
    picture = [line for line in chapter.splitlines() if re.match(r" {4}\w+ {2}", line)]
    drawn = [tuple(re.split(r" {2,}", line.strip())[:-1]) for line in picture]
    assert drawn == [tuple(room or "__init__" for room in floor) for floor in reversed(floors)]

    named = re.findall(r"`([^`]+)`", " ".join(first_cells(chapter)))
    entries = {f"{p.name}/" if p.is_dir() else p.name for p in PACKAGE.iterdir()}
    assert set(named) == entries - {"__init__.py", "__pycache__/", "README.md", "py.typed", "docs/"}


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
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", section(GUIDE, "Troubleshooting"))
    assert len(quoted) > 20
    bad = [words for words in quoted if words not in known and words != "CUDA out of memory"]
    assert not bad, bad


def test_nobody_is_sent_to_a_registry_for_this_package():
    """It is on none; only the page about releases says how that changes."""
    sent = re.compile(r"(pip|uv|conda)3? (\w+ )*install[^\n`]*moe[-_]qlora")
    pages = [text_of(file) for file in DOCUMENTS if file.name != "RELEASING.md"]
    assert not [text for text in messages() + pages if sent.search(text)]
    assert sent.search("pip install -U moe-qlora")


@pytest.mark.filterwarnings("ignore")  # of the libraries that the recipe calls
def test_the_recipe_runs(tmp_path):
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path)
    (recipe,) = re.findall(r"```python\n(.+?)```", text_of(README), re.DOTALL)
    assert "Qwen/Qwen3-30B-A3B" in recipe
    script = tmp_path / "recipe.py"
    script.write_text(recipe.replace("Qwen/Qwen3-30B-A3B", str(tmp_path)), encoding="utf-8")
    model = runpy.run_path(str(script))["model"]
    model(**tiny_inputs(model.get_base_model())).logits.sum().backward()
    trained = dict(model.named_parameters())
    factors = [name for name in trained if "lora_B" in name]
    assert any("experts" in name for name in factors)
    for name in factors:
        gradient = trained[name].grad
        assert gradient is not None and gradient.any(), name
