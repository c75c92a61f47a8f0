"""Installed packages against the versions that this one was tested with.

The tests hold `REQUIRED` to pyproject.toml, and its last versions to tools/constraints.txt.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from .report import PROBLEM, WARNING, Finding, Package


class Tested(NamedTuple):
    """Versions of a package."""

    least: str  # The lowest that is accepted
    first: str  # The lowest and the highest series that tests ran with
    last: str


PYTHON = Tested("3.11", "3.11", "3.12")

REQUIRED = {
    "torch": Tested("2.9", "2.11", "2.13"),
    "transformers": Tested("5.20", "5.20", "5.23"),
    "bitsandbytes": Tested("0.50", "0.50", "0.50"),
    "peft": Tested("0.20", "0.20", "0.21"),
    "accelerate": Tested("1.1", "1.15", "1.15"),
    "safetensors": Tested("0.8", "0.8", "0.8"),
}
"""What this package computes with; its other dependencies are left to pip."""

OPTIONAL = {
    "triton": Tested("3.5", "3.6", "3.6"),
    "trl": Tested("1.16", "1.16", "1.16"),
    "liger-kernel": Tested("0.8", "0.8", "0.8"),
    "deepspeed": Tested("0.19", "0.19", "0.19"),
    "axolotl": Tested("0.21", "0.21", "0.21"),
    "llamafactory": Tested("0.9", "0.9", "0.9"),
    "ms-swift": Tested("4.6", "4.6", "4.6"),
}
"""Programs and libraries that tests run with where they are installed."""

Versions = dict[str, tuple[int, ...]]


def release_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version before any suffix: (2, 13, 0) for "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> tuple[Package, ...]:
    """Return every package that matters, Python first."""
    rows = [_package("python", platform.python_version(), PYTHON, True)]
    rows += [_package(n, installed_version(n), tested, True) for n, tested in REQUIRED.items()]
    rows += [_package(n, installed_version(n), tested, False) for n, tested in OPTIONAL.items()]
    return tuple(rows)


def releases(rows: tuple[Package, ...]) -> Versions:
    """Return the numbers of each installed version, by the package's name."""
    return {row.name: release_of(row.installed) for row in rows if row.installed}


def _package(name: str, installed: str | None, tested: Tested, required: bool) -> Package:
    span = tested.first if tested.first == tested.last else f"{tested.first} to {tested.last}"
    return Package(name, installed, tested.least, span, _status(installed, tested, required))


def _status(installed: str | None, tested: Tested, required: bool) -> str:
    if installed is None:
        return "missing" if required else "not installed"
    release = release_of(installed)
    if release < release_of(tested.least):
        return "too old"
    first, last = release_of(tested.first), release_of(tested.last)
    return "tested" if first <= release[: len(last)] <= last else "untested"


def findings(rows: tuple[Package, ...]) -> list[Finding]:
    """Return what is wrong with versions."""
    found = []
    for row in rows:
        if row.status == "missing":
            what = f"{row.name} is not installed."
            found.append(Finding(PROBLEM, what, f"Install {row.name} {row.least} or later."))
        elif row.status == "too old":
            what = f"{row.name} {row.installed} is older than {row.least}, the lowest that works."
            found.append(Finding(PROBLEM, what, f"Install {row.name} {row.tested}."))
        elif row.status == "untested":
            what = f"{row.name} {row.installed} is not a version that was tested ({row.tested})."
            cure = f"Look at the first losses, or install {row.name} {row.tested}."
            found.append(Finding(WARNING, what, cure))
    return found
