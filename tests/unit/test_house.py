"""The house: which room may import which, and what no room may do."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_qlora"
FILES = sorted(PACKAGE.rglob("*.py"))

# An import may go to a room on the same floor or further down, never up.
FLOORS = (
    ("errors", "layout", "progress"),
    ("registry", "detect", "memory"),
    ("codec", "folder"),
    ("storage",),
    ("experts",),
    ("quantize",),
    ("lora",),
    ("hf",),
    ("checkpoint",),
    ("peft",),
    ("plan",),
    ("integrations",),
    ("cli", "testing"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Rooms that have grown into several files: every further file belongs to the room of its prefix.
ANNEXES = {"detection": "detect"}

HOSTS = {"axolotl", "trl", "accelerate", "llamafactory", "swift"}
MODEL_LIBRARIES = {"transformers", "peft"}
MAY_NAME_MODEL_LIBRARIES = {
    *("hf", "experts", "quantize", "lora", "peft", "checkpoint", "plan", "integrations"),
    *("testing", "cli"),
}


def room_of(module: str) -> str:
    """The room of `moe_qlora.<module>`: its first component, or the room it is an annex of."""
    first = module.partition(".")[0]
    if first in FLOOR or first in ("", "kernels"):
        return first
    if first in ANNEXES:
        return ANNEXES[first]
    owner = first.split("_")[0]
    assert owner in FLOOR, f"moe_qlora/{first} belongs to no room of the house"
    return owner


def module_of(file: Path) -> str:
    """`a.b` for moe_qlora/a/b.py, and for moe_qlora/a/b/__init__.py."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> list[tuple[str, int]]:
    """Absolute dotted names of everything that a file imports, wherever, and the lines."""
    return imports_in(file.read_text(encoding="utf-8"), module_of(file), file.name == "__init__.py")


def imports_in(source: str, module: str, is_package: bool) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["moe_qlora", *filter(None, module.split("."))]
                up = node.level - 1 if is_package else node.level
                base = ".".join([*here[: len(here) - up], *filter(None, [base])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append((str(node.args[0].value), node.lineno))
    return found


def trespasses(module: str, imported: str) -> str | None:
    """Why `moe_qlora.<module>` may not import `imported`; None where it may."""
    room, (top, *rest) = room_of(module), imported.split(".")
    if top in MODEL_LIBRARIES and room not in MAY_NAME_MODEL_LIBRARIES:
        return f"{room} may not name {top}"
    if top in HOSTS and room != "integrations":
        return f"only integrations may name {top}"
    if room == "kernels" and top not in {"__future__", "torch", "triton", "moe_qlora"}:
        stdlib = top in sys.stdlib_module_names
        return None if stdlib else f"kernels import torch and triton only, not {top}"
    if top != "moe_qlora" or not rest:
        return None
    target = rest[0]
    if not ((PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()):
        return None  # a name of the package itself, such as __version__
    goal = room_of(target)
    if room == "":
        return None  # the package's face names every room
    if room == "kernels":
        return None if goal == "kernels" else f"kernels may not import {target}"
    if goal == "kernels":
        return None
    return (
        None if FLOOR[goal] <= FLOOR[room] else f"{room} may not import {goal}, which is above it"
    )


def test_imports_go_one_way():
    bad = [
        f"{file.relative_to(ROOT)}:{line}: {reason}"
        for file in FILES
        for name, line in imports_of(file)
        if (reason := trespasses(module_of(file), name))
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("codec", "from .layout import ExpertParam", False),
        ("codec", "from . import quantize", True),
        ("codec", "from moe_qlora.quantize import x", True),
        ("codec", "import moe_qlora.quantize", True),
        ("codec", "def f():\n    from .quantize import x", True),
        ("quantize", "from .codec import pack", False),
        ("quantize_report", "from .peft import x", True),
        ("detection.walk", "from ..codec import pack", True),
        ("detection.walk", "from .judge import x\nfrom ..layout import y", False),
        ("detection.walk", "import transformers", True),
        ("codec", "from transformers.quantizers import x", True),
        ("quantize", "import transformers", False),
        ("cli.dump", "import accelerate", True),
        ("kernels.reference", "from ..codec import pack", True),
        ("kernels.reference", "import numpy", True),
        ("kernels.reference", "import math\nimport torch", False),
        ("storage", "import importlib\nimportlib.import_module('peft')", True),
    ],
)
def test_the_rule_itself(module, source, bad):
    reasons = [trespasses(module, name) for name, _ in imports_in(source, module, False)]
    assert any(reasons) is bad


@pytest.mark.parametrize("folder", ["moe_qlora", "tests", "tools", ".ci"])
def test_ascii(folder):
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", "")]
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        if path.is_file()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if not line.isascii()
    ]
    assert not bad, bad


def test_no_environment_switches():
    pattern = re.compile(r"os\.environ|getenv|\benviron\b")
    bad = [str(file.relative_to(ROOT)) for file in FILES if pattern.search(file.read_text("utf-8"))]
    assert not bad, bad


def test_no_prints_in_the_library():
    bad = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        if room_of(module_of(file)) != "cli"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not bad, bad


def test_detection_names_no_model():
    """Structure decides: no model type of transformers is named in detection."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = {name for name in CONFIG_MAPPING_NAMES if len(name) > 4 or any(map(str.isdigit, name))}
    bad = []
    for file in (PACKAGE / "detect.py", *sorted((PACKAGE / "detection").rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = set(re.findall(r"\w+", node.value.lower()))
                if "\n" not in node.value and words & types - {"visual", "vision"}:
                    bad.append(f"{file.name}:{node.lineno}: {sorted(words & types)}")
    assert not bad, bad


def test_every_folder_is_shipped():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(project["tool"]["setuptools"]["packages"])
    there = {
        "moe_qlora" + "".join(f".{part}" for part in file.parent.relative_to(PACKAGE).parts)
        for file in FILES
    }
    assert shipped == there | {"moe_qlora.model_registry"}


def test_the_tested_versions_satisfy_the_bounds():
    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line and line[0] != "#")
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["test"] + extras["demo"] + extras["dev"]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name != "moe-qlora":
            version = Version(pinned[requirement.name.lower()])
            assert version in requirement.specifier, line
