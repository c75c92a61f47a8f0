"""Installed packages against the versions that this one was tested with."""

from __future__ import annotations

import platform

from ..versions import OPTIONAL, PYTHON, REQUIRED, Range, installed_version, release_of
from .report import PROBLEM, WARNING, Finding, Package

Versions = dict[str, tuple[int, ...]]


def packages() -> tuple[Package, ...]:
    """Return every package that matters, Python first."""
    rows = [_package("python", platform.python_version(), PYTHON, True)]
    rows += [_package(n, installed_version(n), tested, True) for n, tested in REQUIRED.items()]
    rows += [_package(n, installed_version(n), tested, False) for n, tested in OPTIONAL.items()]
    return tuple(rows)


def releases(rows: tuple[Package, ...]) -> Versions:
    """Return the numbers of each installed version, by the package's name."""
    return {row.name: release_of(row.installed) for row in rows if row.installed}


def _package(name: str, installed: str | None, tested: Range, required: bool) -> Package:
    return Package(name, installed, str(tested), _status(installed, tested, required))


def _status(installed: str | None, tested: Range, required: bool) -> str:
    if installed is None:
        return "missing" if required else "not installed"
    if tested.includes(installed):
        return "tested"
    older = release_of(installed) < release_of(tested.first)
    return "too old" if required and older else "untested"


def findings(rows: tuple[Package, ...]) -> list[Finding]:
    """Return what is wrong with versions."""
    found = []
    for row in rows:
        if row.status == "missing":
            what, cure = f"{row.name} is not installed.", f"Install {row.name} {row.tested}."
            found.append(Finding(PROBLEM, what, cure))
        elif row.status == "too old":
            what = f"{row.name} {row.installed} is older than what was tested ({row.tested})."
            found.append(Finding(PROBLEM, what, f"Install {row.name} {row.tested}."))
        elif row.status == "untested":
            what = f"{row.name} {row.installed} is not a version that was tested ({row.tested})."
            cure = f"Look at the first losses, or install {row.name} {row.tested}."
            found.append(Finding(WARNING, what, cure))
    return found
