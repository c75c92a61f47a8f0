"""The house: which room may import which, and what no room may do."""

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moe_qlora.versions import OPTIONAL, REQUIRED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_qlora"
FILES = sorted(PACKAGE.rglob("*.py"))

# An import goes to a room on a lower floor, or stays within its own; never up, never across.
FLOORS = (
    ("errors", "kernels", "versions"),
    ("layout", "progress"),
    ("registry", "detection", "packing"),
    ("world",),
    ("models", "testing", "experts"),
    ("checkpoint",),
    ("lora",),
    ("serving",),
    ("hf", "planning"),
    ("distributed", "train"),
    ("quantize", "diagnosis"),
    ("integrations", "report"),
    ("",),  # the package's own face
    ("cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What one GPU does without: only the package's face imports it, and world.py hands it down. The
# callers of `prepare_training` may.
BEHIND_A_SEAM = {"distributed", "train"}
SEAMS = {"moe_qlora.integrations.host": "train"}
HOSTS = {"axolotl", "trl", "accelerate", "llamafactory", "swift", "liger_kernel"}
MODEL_LIBRARIES = {"transformers", "peft"}
WITHOUT_MODEL_LIBRARIES = {"kernels", "packing", "detection", "layout", "errors", "progress"}


def room_of(module: str) -> str:
    """The room of a module of ours: the package's own face is ""."""
    room = module.removeprefix("moe_qlora").strip(".").partition(".")[0]
    assert room in FLOOR, f"moe_qlora/{room} stands on no floor of the house"
    return room


def trespasses(module: str, imported: str) -> str | None:
    """Why a module may not import another, or another package; None where it may."""
    room, is_ours = room_of(module), imported.partition(".")[0] == "moe_qlora"
    if imported in MODEL_LIBRARIES and room in WITHOUT_MODEL_LIBRARIES:
        return f"{room} may not name {imported}"
    if imported in HOSTS and room != "integrations" and module != "moe_qlora.train.liger":
        return f"only integrations may name {imported}"
    if not is_ours and room == "kernels":
        allowed = imported in {"torch", "triton", *sys.stdlib_module_names}
        return None if allowed else f"kernels import torch and triton only, not {imported}"
    goal = room_of(imported) if is_ours else room
    if goal in BEHIND_A_SEAM and room not in {goal, ""} and SEAMS.get(module) != goal:
        return f"{room} may not import {goal}: one process does without it"
    if goal == room or FLOOR[goal] < FLOOR[room]:
        return None
    return f"{room} may not import {goal or 'the package itself'}, which is not below it"


def test_imports_go_one_way_and_in_no_circle():
    import grimp

    graph = grimp.build_graph("moe_qlora", include_external_packages=True, cache_dir=None)
    ours = {module for module in graph.modules if module.partition(".")[0] == "moe_qlora"}
    edges = {module: graph.find_modules_directly_imported_by(module) for module in ours}
    pairs = [(module, each) for module, imports in edges.items() for each in imports]
    bad = [f"{pair[0]}: {reason}" for pair in pairs if (reason := trespasses(*pair))]
    assert len(pairs) > 1000 and not bad, "\n".join(bad)
    TopologicalSorter(edges).prepare()  # raises a CycleError that names the modules


def test_no_environment_switches_no_prints_and_no_imports_by_name():
    pattern = re.compile(r"(?m)getenv|\benviron\b|^\s*print\(|__import__|module\([\"'][^.]")
    bad = [str(file.relative_to(ROOT)) for file in FILES if pattern.search(file.read_text("utf-8"))]
    assert not bad, bad


def test_detection_names_no_model():
    """Structure decides: no model type of transformers is named in detection."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = {name for name in CONFIG_MAPPING_NAMES if len(name) > 4 or any(map(str.isdigit, name))}
    bad = []
    for file in (PACKAGE / "detection").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = set(re.findall(r"\w+", node.value.lower()))
                if "\n" not in node.value and words & types - {"visual", "vision"}:
                    bad.append(f"{file.name}:{node.lineno}: {sorted(words & types)}")
    assert not bad, bad


def test_codecs_are_asked_and_not_named():
    """A codec's name stands in its own file, in the kernels' tables and where users type it."""
    named, compared = set(), []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in {"nf4", "fp4", "int8", "mxfp4"}:
                named.add(str(file.relative_to(PACKAGE)))
            elif isinstance(node, ast.Compare):
                terms = [ast.unparse(term) for term in (node.left, *node.comparators)]
                kinds = [term for term in terms if re.search(r"\bkind$", term)]
                if kinds and any(re.search(r"\b(NF4|FP4|INT8|MXFP4)\b", term) for term in terms):
                    compared.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(named) <= 6, sorted(named)
    assert not compared, compared


# One statement of the versions, moe_qlora/versions.py: what else names them is held to it.
TESTED = {**REQUIRED, **OPTIONAL}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    return [one for one in map(Requirement, lines) if one.name != "moe-qlora"]


def series(version: str, step: int) -> str:
    """The series before or after: "2.14" of "2.13" and 1."""
    major, last = version.rsplit(".", 1)
    return f"{major}.{int(last) + step}"


def test_pyproject_allows_what_was_tested_and_no_more():
    bounded = set()
    for one in requirements():
        if one.name in TESTED:
            tested = TESTED[one.name]
            for version in (tested.first, tested.last):
                assert Version(f"{version}.0") in one.specifier, one
            assert Version(f"{series(tested.last, 1)}.0") not in one.specifier, one
            assert Version(f"{series(tested.first, -1)}.99") not in one.specifier, one
            bounded.add(one.name)
        else:  # A bound that nothing explains keeps people from installing what works.
            assert {each.operator for each in one.specifier} <= {">="}, one
    assert set(REQUIRED) < bounded


def test_constraints_are_of_tested_series_and_leave_triton_to_torch():
    """A pin of triton once made CUDA builds of torch impossible."""
    lines = (ROOT / "tools/constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and line[0] != "#")
    pins = {canonicalize_name(name): version for name, version in pairs}
    for name, pin in pins.items():
        assert not re.fullmatch(r"triton|(nvidia|cuda)-.*", name)
        assert name not in TESTED or TESTED[name].includes(pin)
    assert set(REQUIRED) < set(pins)
