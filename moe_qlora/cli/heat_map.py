"""Draw the heat map of `moe-qlora verify --heat-map FILE`; only then is matplotlib imported."""

from __future__ import annotations

import math
from pathlib import Path

from ..checkpoint.verify import VerifyReport
from ..errors import CheckpointError, visible
from ..report.error import grids
from .chart import write_png


def draw(report: VerifyReport, file: Path) -> None:
    """Write one map of errors for each kind of expert weight: layers down, experts across."""
    from matplotlib.figure import Figure

    panels = grids(report.errors)
    if not panels:
        raise CheckpointError(f"{report.folder} has no packed experts that a map could show.")
    rows = [len(layers) for layers, _ in panels.values()]
    figure = Figure(
        figsize=(10.0, sum(max(1.6, 0.14 * n + 1.0) for n in rows)), layout="constrained"
    )
    every = [value for _, grid in panels.values() for row in grid for value in row]
    finite = [value for value in every if math.isfinite(value)] or [0.0]
    style = {"vmin": min(finite), "vmax": max(finite), "cmap": "viridis"}
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 6 for n in rows])
    for (pattern, (layers, grid)), axis in zip(panels.items(), axes[:, 0], strict=True):
        image = axis.imshow(grid, aspect="auto", interpolation="nearest", **style)
        axis.set_title(visible(pattern), fontsize="medium", parse_math=False)
        axis.set_ylabel("layer")
        step = max(len(layers) // 12, 1)
        axis.set_yticks(range(0, len(layers), step), layers[::step])
        across = max(len(grid[0]) // 16, 1)
        axis.set_xticks(range(0, len(grid[0]), across))
        axis.set_xlabel("expert")
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="relative error (Frobenius)")
    title = visible(f"{report.folder.name}: error of {report.kind}")
    figure.suptitle(title, parse_math=False)
    write_png(figure, file)
