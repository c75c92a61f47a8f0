"""The quantization error of a packed folder, by layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.manifest import is_packed
from ..checkpoint.verify import WeightError, verify
from ..layout import name_pattern
from ..progress import Progress
from .pieces import ErrorMap, ErrorPiece, LinearErrors, Missing


def grids(errors: tuple[WeightError, ...]) -> dict[str, tuple[list[str], list[list[float]]]]:
    """Return, for each kind of expert weight, its layers and a row of its experts' errors for each.

    Weights of one name but of different numbers of experts are of different kinds.
    """
    panels: dict[str, tuple[list[str], list[list[float]]]] = {}
    for error in errors:
        if not error.expert:
            continue
        pattern = f"{name_pattern(error.name)} ({len(error.experts)} experts)"
        layers, grid = panels.setdefault(pattern, ([], []))
        layers.append(layer_label(error.name))
        grid.append(list(error.experts))
    return panels


def layer_label(name: str) -> str:
    """Return the numbers in a full name, which tell its layer: "3" for `layers.3.mlp`."""
    return ".".join(re.findall(r"(?<![^.])\d+(?![^.])", name)) or "-"


def measure(
    folder: Path | None,
    against: str | Path | None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ErrorPiece | Missing:
    """Compare a packed folder with the checkpoint that it was packed from."""
    if folder is None or not is_packed(folder):
        return Missing(
            "The error is measured of a packed folder: write one with moe-qlora quantize, or "
            "save_pretrained, and report on it."
        )
    if against is None:
        return Missing(
            "The error needs the checkpoint that the folder was packed from: name it with against "
            "(--against on the command line)."
        )
    report = verify(folder, against, trust_remote_code=trust_remote_code, progress=progress)
    if not report.good:
        return Missing(f"The packed folder is damaged: {report.problems[0]}", fault=True)
    maps = tuple(
        ErrorMap(pattern, tuple(layers), tuple(map(tuple, rows)))
        for pattern, (layers, rows) in grids(report.errors).items()
    )
    return ErrorPiece(report.kind, str(against), maps, tuple(_linears(report.errors)))


def _linears(errors: tuple[WeightError, ...]) -> Iterator[LinearErrors]:
    alike: dict[str, list[WeightError]] = {}
    for error in errors:
        if not error.expert:
            alike.setdefault(name_pattern(error.name), []).append(error)
    for pattern, group in alike.items():
        worst = max(group, key=lambda error: error.relative)
        mean = sum(error.relative for error in group) / len(group)
        yield LinearErrors(pattern, len(group), mean, worst.relative, worst.name)
