"""Draws results/layer.csv: a step's time and kept bytes against tokens, ours and its peers.

python tools/bench/plot.py            writes results/layer-<shape>.png, one for each shape
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import RESULTS

PANELS = (
    ("step", "ms a step"),
    ("step, checkpointed", "ms a step, checkpointed"),
    ("step over FLOP floor", "times the FLOP floor"),
    ("kept", "MiB kept for backward"),
)


def main() -> None:
    """Draw every shape that has rows."""
    series: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    with (RESULTS / "layer.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            setting = dict(word.split("=") for word in row["setting"].split() if "=" in word)
            if "cap" not in setting:
                peer, tokens = setting["peer"], int(setting["tokens"])
                series[row["name"]][row["metric"]][peer][tokens] = float(row["p50"])
    for shape, metrics in series.items():
        draw(shape, metrics, RESULTS / f"layer-{shape}.png")


def draw(shape: str, metrics: Any, path: Path) -> None:
    """One figure of four panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for peer, points in sorted(metrics[metric].items()):
            tokens = sorted(points)
            axes.plot(tokens, [points[n] for n in tokens], marker="o", label=peer)
        axes.set(xlabel="tokens", ylabel=label, xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        if metrics[metric]:
            axes.legend()
    figure.suptitle(f"One layer of {shape}, one H200")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
