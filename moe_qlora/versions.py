"""The tested versions of other packages, and the installed ones.

Tests compare the ranges in pyproject.toml, tools/constraints.txt, README.md and the pages with
these.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Range(NamedTuple):
    """The lowest and the highest series of a package that tests ran with, such as "2.11"."""

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"

    def includes(self, installed: str) -> bool:
        last = release_of(self.last)
        return release_of(self.first) <= release_of(installed)[: len(last)] <= last


PYTHON = Range("3.11", "3.13")

REQUIRED = {
    "torch": Range("2.11", "2.15"),
    "transformers": Range("5.20", "5.24"),
    "bitsandbytes": Range("0.50", "0.50"),
    "peft": Range("0.21", "0.21"),
    "accelerate": Range("1.13", "1.15"),
    "safetensors": Range("0.8", "0.8"),
}
"""Dependencies whose internals matter here; pip handles the others."""

OPTIONAL = {
    "triton": Range("3.6", "3.9"),
    "trl": Range("1.14", "1.16"),
    "liger-kernel": Range("0.8.4", "0.8.5"),
    "deepspeed": Range("0.19", "0.19"),
    "axolotl": Range("0.21", "0.21"),
    "llamafactory": Range("0.9", "0.9"),
    "ms-swift": Range("4.6", "4.6"),
}
"""Optional programs and libraries in the tests."""


def release_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version before any suffix: (2, 13, 0) for "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
