"""Check that the package installs on every Python it supports, with PyPI's torch for CUDA.

    bash tools/resolve            what CI checks
    bash tools/resolve --hosts    the newest of each trainer, alone and together with this package;
                                  writes the table of moe_qlora/docs/trainers.md

torch's CUDA builds pin packages that its CPU builds do not ask for. uv resolves for each Python and
architecture, installed or not, from metadata alone. Nothing is installed.
"""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from moe_qlora.versions import OPTIONAL, PYTHON, REQUIRED

ROOT = Path(__file__).parents[1]
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
EXTRAS = ("test", "demo", "trl", "dev")
CONSTRAINTS = ROOT / "tools/constraints.txt"
HOSTS = ("axolotl", "trl", "unsloth", "ms-swift", "llamafactory", "vllm")
PAGE, MARK = ROOT / "moe_qlora/docs/trainers.md", "Resolved by `bash tools/resolve --hosts`"
OF_TORCH = re.compile(r"triton|(nvidia|cuda)-.*")


def check() -> None:
    """Resolve what CI checks."""
    low, high = (int(version.partition(".")[2]) for version in PYTHON)
    pythons = [f"3.{minor}" for minor in range(low, high + 1)]
    for python in pythons:
        for platform in PLATFORMS:
            check_constraints(python, platform)
        for way in ("highest", "lowest-direct"):
            check_ranges(python, f"--resolution={way}", "--extra=kernels")
    # Some of what axolotl pins exists as source only.
    check_ranges(pythons[-1], "--extra=axolotl", "--build")


def check_constraints(python: str, platform: str) -> None:
    """Resolve what both commands of the README install: pinned, but for what torch itself pins."""
    extras = [f"--extra={extra}" for extra in EXTRAS]
    found = resolve(python, platform, "-c", str(CONSTRAINTS), *extras)
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if line[:1] != "#"}
    loose = sorted(name for name in found if name not in pinned and not OF_TORCH.fullmatch(name))
    if loose:
        told = f"tools/constraints.txt has no version of {', '.join(loose)}: Python {python}"
        sys.exit(f"resolve: {told}")
    print(f"Python {python}, {platform}: torch {found['torch']}, triton {found['triton']}")


def check_ranges(python: str, *arguments: str) -> None:
    """Resolve without constraints: what pip then chooses has to be a version that was tested."""
    found, how = resolve(python, PLATFORMS[0], *arguments), " ".join(arguments)
    for name, tested in {**REQUIRED, **OPTIONAL}.items():
        if name in found and not tested.includes(found[name]):
            told = f"pip would choose {name} {found[name]} for Python {python} ({how}), and"
            sys.exit(f"resolve: {told} {tested} was tested: narrow its range in pyproject.toml")
    chosen = ", ".join(f"{name} {found[name]}" for name in REQUIRED)
    print(f"Python {python}, no constraints, {how}: {chosen}")


def write_hosts() -> None:
    """Write the table of what the newest trainers install, alone and beside this package."""

    def stack(found: dict[str, str]) -> str:
        names = [name for name in ("torch", "transformers", "peft", "trl") if name in found]
        return ", ".join(f"{name} {found[name]}" for name in names)

    rows = [f"{MARK} on {date.today()}, for Python 3.12 on Linux:", ""]
    rows += ["| | alone | together with this package |", "|---|---|---|"]
    for host in HOSTS:
        alone = resolve("3.12", PLATFORMS[0], "--build", project=host)
        try:
            both = resolve("3.12", PLATFORMS[0], "--build", also=f"{host}=={alone[host]}")
            beside = "the same" if stack(both) == stack(alone) else stack(both)
        except ResolveError:
            beside = "impossible"
        rows.append(f"| {host} {alone[host]} | {stack(alone)} | {beside} |")
    page = PAGE.read_text("utf-8")
    start = page.index(MARK)
    rest = page[page.index("\n\n", page.index("|---", start)) :]
    PAGE.write_text(page[:start] + "\n".join(rows) + rest, encoding="utf-8")
    print("\n".join(rows))


class ResolveError(Exception):
    """Nothing satisfies all."""


def resolve(
    python: str, platform: str, *arguments: str, project: str = "", also: str = ""
) -> dict[str, str]:
    """Return the versions that would be installed for this project or a named one, and `also`."""
    sources = ["-"] if project else ["pyproject.toml", *(["-"] if also else [])]
    command = ["uv", "pip", "compile", *sources, "--quiet", "--no-header", "--no-annotate"]
    command += ["--no-build", "--no-python-downloads", "--python-version", python]
    command += ["--python-platform", platform, *arguments]
    given: dict[str, Any] = {"input": project or also, "cwd": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    if done.returncode:
        raise ResolveError(f"{' '.join(command)}:\n{done.stderr}")
    found = (line.split()[0].split("==") for line in done.stdout.splitlines())
    return {canonicalize_name(name): version for name, version in found}


if __name__ == "__main__":
    try:
        write_hosts() if "--hosts" in sys.argv else check()
    except ResolveError as error:
        sys.exit(f"resolve: {error}")
