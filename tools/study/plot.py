"""Draw the study's rows, and write its tables into README.md.

    PYTHONPATH=tools python -m study.plot [RESULTS]

Differences are paired: with bf16 of the same seed, which has the same base and sees the same
batches. A figure is the mean over seeds, the range beside it or the band behind it is that of the
seeds.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .grid import CODECS
from .tables import (
    CHOSEN,
    NAMES,
    Row,
    by_layer,
    by_seed,
    fill,
    gains,
    grouped,
    over_bf16,
    paired,
    read,
    sizes,
    tables,
    values,
)

HERE = Path(__file__).parent
COLORS = {  # of Okabe and Ito, which people tell apart who do not see all colours
    "bf16": "#000000", "int8": "#009e73", "nf4": "#0072b2", "nf4-dq": "#56b4e9",
    "fp4": "#d55e00", "mxfp4": "#cc79a7", "nf4+attention": "#e69f00",
}  # fmt: skip
MARKERS = {"int8": "o", "nf4": "s", "nf4-dq": "D", "fp4": "^", "mxfp4": "v", "nf4+attention": "P"}
SEEDS = ("o", "s", "^")
PLOTS = {
    "codecs": "held-out loss over bf16 by codec, before and after fine-tuning",
    "ranks": "held-out loss on text and code by rank and by learning rate",
    "chosen": "what is gained by which experts have LoRA; loss by the number of weights trained",
    "errors": "error of weights and outputs by how much an expert is used",
    "tokens": "loss over bf16 by how rarely a token's experts are used",
}
GROUPS = 8


def main() -> None:
    """Draw all plots that have rows, and fill in the tables of README.md."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    blocks = tables(results)
    draw(results)
    here = results == HERE / "results"
    for name, words in PLOTS.items():
        if (results / f"{name}.svg").exists():
            image = f"![{words}]({'results/' if here else ''}{name}.svg)\n"
            blocks[name] = f"{image}\n{blocks[name]}"
    page = HERE / "README.md" if here else results / "README.md"
    if not page.exists():
        page.write_text((HERE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    page.write_text(fill(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def draw(results: Path) -> None:
    """Draw every plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "study", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot as plt

    runs = read(results / "runs.csv")
    experts, tokens = read(results / "experts.csv"), read(results / "tokens.csv")
    plots: dict[str, tuple[Callable[[Any], None], Sequence[Row], bool]] = {
        "codecs": (lambda axes: _draw_codecs(axes, runs), runs, True),
        "ranks": (lambda axes: _draw_ranks(axes, runs), runs, True),
        "chosen": (lambda axes: _draw_chosen(axes, runs), runs, False),
        "errors": (lambda axes: _draw_errors(axes, experts), experts, True),
        "tokens": (lambda axes: _draw_tokens(axes, tokens), tokens, True),
    }
    for name, (fill_in, rows, sharey) in plots.items():
        if rows:
            figure, axes = plt.subplots(1, 2, figsize=(9.8, 3.9), sharey=sharey)
            fill_in(axes)
            for axis in axes:
                axis.tick_params(labelleft=True)
            figure.tight_layout()
            figure.savefig(results / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def _draw_codecs(axes: Any, runs: Sequence[Row]) -> None:
    exact = by_seed(runs, codec="bf16")
    present = [c for c in (*CODECS[1:], "nf4+attention") if by_seed(runs, codec=c)]
    for axis, state in zip(axes, ("before", "after"), strict=True):
        for place, codec in enumerate(present):
            mine = by_seed(runs, codec=codec)
            for column, (seed, marker) in enumerate(zip(sorted(mine), SEEDS, strict=False)):
                for difference in paired({seed: mine[seed]}, exact, f"text_{state}"):
                    axis.plot(
                        place + 0.17 * (column - 1), difference, marker, color=COLORS[codec],
                        label=f"seed {seed}" if place == 0 else None,
                    )  # fmt: skip
            differences = paired(mine, exact, f"text_{state}")
            if differences:
                axis.hlines(mean(differences), place - 0.33, place + 0.33, color="black")
        axis.set_xticks(range(len(present)), [NAMES[c] for c in present], rotation=30, ha="right")
        axis.set(title=f"{state} fine-tuning; line: mean of the seeds")
        axis.set_ylabel("loss on text minus that of bf16, nats")
        axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
        for handle in axis.legend(fontsize=8).legend_handles:
            handle.set_color("#666666")


def _draw_ranks(axes: Any, runs: Sequence[Row]) -> None:
    for axis, key, column in ((axes[0], "rank", "rank"), (axes[1], "rate", "learning_rate")):
        for name, data, color in (
            ("text", "text_after", "#0072b2"),
            ("code", "code_after", "#d55e00"),
        ):
            for codec, line in (("nf4", "o-"), ("bf16", "x--")):
                label = f"{name}, NF4" if codec == "nf4" else None if name == "code" else "bf16"
                points = [
                    (values(mine, column)[0], values(mine, data))
                    for place in sorted({row[key] for row in runs})
                    if (mine := by_seed(runs, codec=codec, **{key: place}))
                ]
                x = [place for place, _ in points]
                axis.plot(x, [mean(y) for _, y in points], line, label=label,
                          color=color if codec == "nf4" else "black", markersize=5)  # fmt: skip
                low, high = ([f(y) for _, y in points] for f in (min, max))
                axis.fill_between(x, low, high, color=color, alpha=0.15)
                if codec == "nf4" and x:
                    axis.set_xscale("log")
                    axis.set_xticks(x, [f"{each:g}" for each in x])
                    axis.minorticks_off()
        axis.set_ylabel("held-out loss after fine-tuning, nats")
        axis.legend(fontsize=8)
    axes[0].set(title="learning rate 0.002, alpha = 2 r", xlabel="r of LoRA")
    axes[1].set(title="r = 16, alpha = 32", xlabel="learning rate")


def _draw_chosen(axes: Any, runs: Sequence[Row]) -> None:
    every = by_seed(runs, targets="experts")
    bars = [(e, by_seed(runs, targets="experts", experts=e)) for e in CHOSEN]
    bars = [(experts, mine) for experts, mine in bars if mine]
    whole = mean(values(every, "trained")) if every else 1.0
    for place, (_, mine) in enumerate(bars):
        axes[0].bar(place, mean(gains(mine)), color="#56b4e9")
        for column, (gain, marker) in enumerate(zip(gains(mine), SEEDS, strict=False)):
            axes[0].plot(place + 0.2 * (column - 1), gain, marker, color="black", markersize=4)
    labels = [f"{e}\n{100 * mean(values(m, 'trained')) / whole:.0f} %" for e, m in bars]
    axes[0].set_xticks(range(len(bars)), labels, fontsize=8)
    axes[0].set(
        title="LoRA on experts alone; %: weights trained", ylabel="loss on text gained, nats"
    )
    colors = {"attention + experts": "#0072b2", "experts": "#d55e00", "attention": "#009e73"}
    shapes = {"attention + experts": "o", "experts": "s", "attention": "^"}
    for name, mine in sizes(runs):
        what, _, which = name.partition(", ")
        x, y = mean(values(mine, "trained")), values(mine)
        low, high = mean(y) - min(y), max(y) - mean(y)
        label = None if what in axes[1].get_legend_handles_labels()[1] else what
        axes[1].errorbar(x, mean(y), [[low], [high]], fmt=shapes[what], color=colors[what],
                         markersize=5, label=label)  # fmt: skip
        below = {"hot-50, r=16": (-4, -12), "by use, r=16": (-8, -12)}.get(which)
        left = what == "experts"
        words = which.removesuffix(", r=16")
        axes[1].annotate(
            "all" if left and words == "r=16" else words, (x, mean(y)), fontsize=7,
            color=colors[what], ha="center" if below else "right" if left else "left",
            textcoords="offset points", xytext=below or (-6 if left else 6, -3),
        )  # fmt: skip
    axes[1].set(xscale="log", title="NF4, r=16 where none is named; bars: range of seeds")
    axes[1].set(xlabel="weights trained", ylabel="loss on text after, nats")
    axes[1].legend(fontsize=8)


def _draw_errors(axes: Any, experts: Sequence[Row]) -> None:
    for axis, column in zip(axes, ("weight_error", "output_error"), strict=True):
        for codec in CODECS[1:]:
            seeds: dict[Any, list[list[float | None]]] = defaultdict(list)
            for layer in by_layer(experts, codec):
                seeds[layer[0]["seed"]].append(grouped(layer, column, GROUPS))
            if seeds and codec != "nf4-dq":  # which lies on nf4
                cells = [
                    [mean(g for layer in each if (g := layer[place])) for each in seeds.values()]
                    for place in range(GROUPS)
                    if all(any(layer[place] for layer in each) for each in seeds.values())
                ]
                places = range(1, len(cells) + 1)
                axis.plot(places, [mean(cell) for cell in cells], f"{MARKERS[codec]}-",
                          color=COLORS[codec], label=NAMES[codec], markersize=4)  # fmt: skip
                low, high = ([f(cell) for cell in cells] for f in (min, max))
                axis.fill_between(places, low, high, color=COLORS[codec], alpha=0.15)
        axis.set(xlabel=f"1/{GROUPS} of a layer's experts; 1: most used")
        axis.set(title="mean of the layers; band: range of the seeds")
        axis.set_ylabel(f"relative error of an expert's {column.split('_')[0]}s, %")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.4))


def _draw_tokens(axes: Any, tokens: Sequence[Row]) -> None:
    for axis, state in zip(axes, ("before", "after"), strict=True):
        for codec in ("int8", "nf4", "fp4", "mxfp4"):
            seeds = list(over_bf16(tokens, codec, state).values())
            if seeds:
                groups = list(zip(*seeds, strict=True))
                places = range(1, 1 + len(groups))
                axis.plot(places, [mean(group) for group in groups], f"{MARKERS[codec]}-",
                          color=COLORS[codec], label=NAMES[codec], markersize=4)  # fmt: skip
                low, high = ([f(group) for group in groups] for f in (min, max))
                axis.fill_between(places, low, high, color=COLORS[codec], alpha=0.12)
        axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=f"{state} fine-tuning; band: range of the seeds")
        axis.set(xlabel="tenth of the tokens; 10: rarest experts")
        axis.set_ylabel("loss minus that of bf16, nats")
        axis.legend(fontsize=8, ncols=2)


if __name__ == "__main__":
    main()
