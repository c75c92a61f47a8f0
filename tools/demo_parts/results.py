"""What came of the demo, as a table and as a picture."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moe_qlora.layout import human_bytes

from .job import Run

COLORS = ("tab:gray", "tab:blue", "tab:green")


def table(run: Run) -> Table:
    """Return the bytes and the loss of each state."""
    shown = Table(title="Bytes of weights, and loss on held-out text", box=SIMPLE_HEAD)
    shown.add_column("")
    for heading in ("experts", "others", "LoRA", "total", "loss"):
        shown.add_column(heading, justify="right")
    for state in run.states:
        sizes = (state.experts, state.rest, state.adapter)
        cells = [human_bytes(size) if size else "-" for size in (*sizes, sum(sizes))]
        shown.add_row(state.name, *cells, f"{state.loss:.3f}")
    return shown


def draw(run: Run, file: Path) -> None:
    """Draw the losses of training, and the states beside each other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = 2
    rows = 2 if len(run.curves) > 1 else 1
    if rows == 1:
        columns = 3
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.9 * rows), squeeze=False)
    axes = [axis for row in grid for axis in row]
    for axis, (title, losses) in zip(axes, run.curves.items(), strict=False):
        _curve(axis, title, losses)
    names = [state.name.replace(", ", ",\n").replace(" ", "\n", 1) for state in run.states]
    _bars(
        axes[-2],
        "Loss on held-out English, lower is better",
        names,
        [state.loss for state in run.states],
        [f"{state.loss:.3f}" for state in run.states],
    )
    states = run.states[:2]
    _bars(
        axes[-1],
        f"Bytes of the experts: {states[0].experts / states[1].experts:.2f} times fewer",
        ["16 bit", "packed, nf4"],
        [state.experts for state in states],
        [human_bytes(state.experts) for state in states],
    )
    axes[-1].yaxis.set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Return the mean around each value, the neighbours weighed by a Gaussian."""
    width = max(len(values) / 30, 1.0)
    means = []
    for place in range(len(values)):
        weights = [math.exp(-(((place - i) / width) ** 2) / 2) for i in range(len(values))]
        means.append(sum(map(operator.mul, weights, values)) / sum(weights))
    return means


def _curve(axis: Any, title: str, losses: list[float]) -> None:
    steps = range(1, len(losses) + 1)
    axis.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1, label="each step")
    axis.plot(steps, smooth(losses), color="tab:blue", linewidth=2, label="smoothed")
    axis.set(title=f"Training {title}", xlabel="step", ylabel="loss", xlim=(0, len(losses)))
    axis.grid(alpha=0.3)
    axis.legend()


def _bars(axis: Any, title: str, names: list[str], values: list[float], labels: list[str]) -> None:
    bars = axis.bar(names, values, color=COLORS[: len(names)], width=0.6)
    axis.bar_label(bars, labels, padding=3, fontweight="bold")
    axis.set(title=title, ylim=(0, 1.15 * max(values)))
    axis.spines[["top", "right"]].set_visible(False)
