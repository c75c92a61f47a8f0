"""Check that the package installs on every Python it supports, with PyPI's torch for CUDA.

    bash tools/resolve

A machine whose pip takes a CPU build of torch cannot notice that the versions exclude each other
elsewhere: torch's CUDA builds pin packages that its CPU builds do not ask for. Here uv resolves for
each Python and architecture, installed or not, from metadata alone. Nothing is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from packaging.utils import canonicalize_name

from moe_qlora.versions import OPTIONAL, PYTHON, REQUIRED

ROOT = Path(__file__).parents[1]
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
EXTRAS = ("test", "demo", "trl", "dev")
CONSTRAINTS = ROOT / "tools/constraints.txt"
OF_TORCH = re.compile(r"triton|(nvidia|cuda)-.*")


def main() -> None:
    start = time.monotonic()
    low, high = (int(version.partition(".")[2]) for version in PYTHON)
    pythons = [f"3.{minor}" for minor in range(low, high + 1)]
    for python in pythons:
        for platform in PLATFORMS:
            check_constraints(python, platform)
        for way in ("highest", "lowest-direct"):
            check_ranges(python, f"--resolution={way}", "--extra=kernels")
    # Some of what axolotl pins exists as source only.
    check_ranges(pythons[-1], "--extra=axolotl", "--build")
    print(f"All is installable: {time.monotonic() - start:.0f} s")


def check_constraints(python: str, platform: str) -> None:
    """Resolve what both commands of the README install: pinned, but for what torch itself pins."""
    found = resolve(
        python, platform, "-c", str(CONSTRAINTS), *(f"--extra={extra}" for extra in EXTRAS)
    )
    lines = [
        line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line[:1] not in ("", "#")
    ]
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    loose = sorted(name for name in found if name not in pinned and not OF_TORCH.fullmatch(name))
    if loose:
        fail(f"tools/constraints.txt has no version of {', '.join(loose)}: Python {python}")
    print(f"Python {python}, {platform}: torch {found['torch']}, triton {found['triton']}")


def check_ranges(python: str, *arguments: str) -> None:
    """Resolve without constraints: what pip then chooses has to be a version that was tested."""
    found = resolve(python, PLATFORMS[0], *arguments)
    for name, tested in {**REQUIRED, **OPTIONAL}.items():
        if name in found and not tested.includes(found[name]):
            fail(
                f"pip would choose {name} {found[name]} for Python {python} "
                f"({' '.join(arguments)}), and {tested} was tested: narrow its range in "
                "pyproject.toml"
            )
    chosen = ", ".join(f"{name} {found[name]}" for name in REQUIRED)
    print(f"Python {python}, no constraints, {' '.join(arguments)}: {chosen}")


def fail(message: str) -> NoReturn:
    sys.exit(f"resolve: {message}")


def resolve(python: str, platform: str, *arguments: str) -> dict[str, str]:
    """Return the version of each package that would be installed; exit where there is none."""
    command = [
        *("uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"),
        *("--no-build", "--no-python-downloads", "--python-version", python),
        *("--python-platform", platform, *arguments),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(command)}:\n{done.stderr}")
    rows = (line.split() for line in done.stdout.splitlines())
    return {
        canonicalize_name(name): version for name, version in (row[0].split("==") for row in rows)
    }


if __name__ == "__main__":
    main()
