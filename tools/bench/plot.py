"""Draws results/layer.csv and results/model.csv: ours beside its peers.

python tools/bench/plot.py            all that have rows; of equal rows the last counts

layer-<shape>.png     a step's time, its ratio to the floors, kept bytes and peak against tokens
model-<name>.png      tokens a second and memory of whole models
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS

LAYER = (
    ("step", "ms a step"),
    ("step over FLOP floor", "times the FLOP floor"),
    ("kept", "MiB kept for backward"),
    ("step, checkpointed", "ms a step, checkpointed"),
    ("step over byte floor", "times the byte floor"),
    ("peak", "MiB of peak"),
)
MODEL = (
    ("throughput", "tokens/s", 1.0),
    ("peak in training", "GB of peak", 1e9),
    ("resident between steps", "GB between steps", 1e9),
)
BARS = {
    "layers": "{} layers", "lora": "LoRA {}", "seq": "{} tokens", "batch": "x {}",
    "checkpointing": "recomputed {}", "linear": "Linear {}", "adapters": "adapters {}",
    "with": "{}", "chunk_mem_const": "chunk_mem_const {}", "attention": "{}",
    "memory": "fitted to {}", "shared-gpu": "{} at once", "expert_rank": "rank {} on experts",
    "data": "batches {}",
}  # fmt: skip
"""What a bar's caption says of a whole model's setting, beside its peer and words without value."""


def main() -> None:
    """Draw every shape and model that has rows."""
    series: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for row, setting in rows(RESULTS / "layer.csv"):
        if "cap" not in setting:
            peer, tokens = setting["peer"], int(setting["tokens"])
            series[row["name"]][row["metric"]][peer][tokens] = float(row["p50"])
    for shape, metrics in series.items():
        lines(shape, metrics, LAYER, f"One layer of {shape}", RESULTS / f"layer-{shape}.png")
    whole: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for row, setting in rows(RESULTS / "model.csv"):
        if "peer" in setting:
            whole[row["name"]][caption(setting)][row["metric"]] = float(row["p50"])
    for name, runs in whole.items():
        bars(name, runs, RESULTS / f"model-{name}.png")


def rows(path: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Each row, and the words of its setting; a word without a value is its own."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            words = (word.partition("=") for word in row["setting"].split())
            yield row, {key: value or key for key, _, value in words}


def caption(setting: dict[str, str]) -> str:
    """A run of a whole model in a few words."""
    words = [words.format(setting[key]) for key, words in BARS.items() if key in setting]
    plain = [key for key, value in setting.items() if key == value]
    return ", ".join([" ".join([setting["peer"], *plain]), *words])


def lines(shape: str, metrics: Any, panels: Any, title: str, path: Path) -> None:
    """Against tokens, a panel for each metric; nothing where there are no rows."""
    from matplotlib.figure import Figure

    if not any(metrics.get(metric) for metric, _ in panels):
        return
    high = (len(panels) + 2) // 3
    figure = Figure(figsize=(13, 3.4 * high), layout="constrained")
    grid = figure.subplots(high, 3, squeeze=False)
    peers = sorted({peer for metric, _ in panels for peer in metrics.get(metric, {})})
    colors = {peer: f"C{i}" for i, peer in enumerate(peers)}
    for axes, (metric, label) in zip(grid.flat, panels, strict=True):
        for peer, points in sorted(metrics.get(metric, {}).items()):
            tokens = sorted(points)
            values = [points[n] for n in tokens]
            axes.plot(tokens, values, marker="o", label=peer, color=colors[peer])
        axes.set(xlabel="tokens", ylabel=label, xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        if metrics.get(metric):
            axes.legend()
    figure.suptitle(f"{title}, one H200")
    figure.savefig(path, dpi=100)


def bars(name: str, runs: Any, path: Path) -> None:
    """A bar for each run of a whole model that was measured to its end."""
    from matplotlib.figure import Figure

    done = {words: of for words, of in runs.items() if "throughput" in of}
    if not done:
        return
    figure = Figure(figsize=(17, 1.2 + 0.3 * len(done)), layout="constrained")
    grid = figure.subplots(1, len(MODEL), sharey=True, squeeze=False)
    captions = list(done)
    for axes, (metric, label, unit) in zip(grid.flat, MODEL, strict=True):
        values = [done[words].get(metric, 0) / unit for words in captions]
        drawn = axes.barh(captions, values, color=[_color(words) for words in captions])
        axes.bar_label(drawn, fmt="%.5g", padding=2, fontsize=8)
        axes.set(xlabel=label)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.25)
    grid.flat[0].invert_yaxis()  # shared
    figure.suptitle(f"Training {name}, one H200")
    figure.savefig(path, dpi=100)


def _color(words: str) -> str:
    return "C0" if words.startswith("ours") else "C7"


if __name__ == "__main__":
    main()
