"""One statement of the versions: what else names them is held to `moe_qlora.versions`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moe_qlora.versions import OPTIONAL, PYTHON, REQUIRED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TESTED = {**REQUIRED, **OPTIONAL}
OF_TORCH = re.compile(r"triton|(nvidia|cuda)-.*")


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    every = map(Requirement, [*project["dependencies"], *extras])
    return [one for one in every if one.name != "moe-qlora"]


def pins() -> dict[str, str]:
    lines = (ROOT / "tools/constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and line[0] != "#")
    return {canonicalize_name(name): version for name, version in pairs}


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
    for name, pin in pins().items():  # a pin of triton once made CUDA builds of torch impossible
        assert not OF_TORCH.fullmatch(name) and (name not in TESTED or TESTED[name].includes(pin))
    assert set(REQUIRED) < set(pins())


@pytest.mark.parametrize("page", ["README.md", "moe_qlora"])
def test_pages_say_the_versions(page):
    """README.md and one page of the guide have this sentence, and no page has another."""
    names = ("torch", "transformers", "peft", "bitsandbytes")
    *most, last = [f"{name} {REQUIRED[name]}" for name in names]
    sentence = f"Tested with Python {PYTHON}, {', '.join(most)} and {last}"
    pages = [ROOT / page] if page.endswith(".md") else (ROOT / page).rglob("*.md")
    said = []
    for text in (path.read_text("utf-8") for path in pages):
        plain = " ".join(text.split())
        said += re.findall(r"Tested with [^()]*? and bitsandbytes [\d.]+\d(?: to [\d.]+\d)?", plain)
    assert said == [sentence]
