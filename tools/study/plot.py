"""Draw the study's rows, and write its tables into README.md.

    PYTHONPATH=tools python -m study.plot [RESULTS]

Differences are paired: with bf16 of the same seed, which has the same base and sees the same
batches. A figure is the mean over seeds, the range beside it that of the seeds.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .grid import CODECS

HERE = Path(__file__).parent
NAMES = {
    "nf4-dq": "NF4, double quantized", "nf4": "NF4", "fp4": "FP4", "int8": "int8",
    "mxfp4": "MXFP4", "bf16": "bf16", "nf4+attention": "NF4, attention too",
}  # fmt: skip
COLORS = dict(
    zip(
        (*CODECS, "nf4+attention"),
        ("#444444", "#1b7f5c", "#1f6fb5", "#6fa8dc", "#c9541f", "#8a4fa3", "#0b3c68"),
        strict=True,
    )
)
PLOTS = {
    "codecs": "held-out loss over bf16, by codec",
    "ranks": "held-out loss by rank and by learning rate",
    "chosen": "what is gained, by which experts have LoRA",
    "errors": "error by use",
    "tokens": "loss over bf16 by how rare a token's experts are",
}
CHOSEN = ("all", "by use", "hot-50", "hot-25", "random-25", "cold-25")

Row = dict[str, Any]


def main() -> None:
    """Draw all plots that have rows, and fill in the tables of README.md."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    runs, base = read(results / "runs.csv"), read(results / "base.csv")
    experts, tokens = read(results / "experts.csv"), read(results / "tokens.csv")
    tables = {
        "base": base_table(base, runs),
        "codecs": codec_table(runs),
        "targets": target_table(runs),
        "ranks": rank_table(runs),
        "chosen": chosen_table(runs),
        "rates": rate_table(runs),
        "length": length_table(runs),
        "errors": error_table(experts),
        "tokens": token_table(tokens),
    }
    draw(results, runs, experts, tokens)
    folder = "results/" if results == HERE / "results" else ""
    for name, words in PLOTS.items():
        if (results / f"{name}.svg").exists():
            tables[name] = f"![{words}]({folder}{name}.svg)\n\n{tables[name]}"
    page = HERE / "README.md" if results == HERE / "results" else results / "README.md"
    if not page.exists():
        page.write_text((HERE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    page.write_text(fill(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def read(file: Path) -> list[Row]:
    """Return a CSV file's rows, numbers as numbers; none where there is no such file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [
            {key: _number(value) for key, value in row.items()} for row in csv.DictReader(stream)
        ]


def _number(text: str | None) -> Any:
    try:
        return float(text or "")
    except ValueError:
        return text


def fill(page: str, tables: dict[str, str]) -> str:
    """Return a page with each table between its marks, `<!-- name -->` and `<!-- end -->`."""
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(start)
        if found:
            page = before + start + table + end + rest.partition(end)[2]
    return page


# Choosing rows.


def by_seed(runs: Iterable[Row], **wanted: Any) -> dict[int, Row]:
    """Return the run of each seed with these settings, and the main ones where none is named."""
    settings: Row = {"codec": "nf4", "targets": "both", "rank": 16.0, "experts": "all"}
    settings |= {"rate": 1.0, "length": 1.0} | wanted
    chosen = [row for row in runs if all(row[key] == value for key, value in settings.items())]
    return {int(row["seed"]): row for row in sorted(chosen, key=lambda row: row["seed"])}


def values(runs: dict[int, Row], column: str = "text_after") -> list[float]:
    """Return a column of the seeds' runs."""
    return [row[column] for row in runs.values()]


def paired(runs: dict[int, Row], others: dict[int, Row], column: str = "text_after") -> list[float]:
    """Return the differences of the seeds that both have."""
    return [runs[seed][column] - others[seed][column] for seed in sorted({*runs} & {*others})]


def said(numbers: Sequence[float], digits: int = 4, *, signed: bool = False) -> str:
    """Return the mean and the seeds' range, as a table says them."""
    if not numbers:
        return ""
    sign = "+" if signed else ""
    text = f"{mean(numbers):{sign}.{digits}f}"
    if len(numbers) > 1:
        text += f" ({min(numbers):{sign}.{digits}f} to {max(numbers):{sign}.{digits}f})"
    return text


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# The tables.


def base_table(base: Sequence[Row], runs: Sequence[Row]) -> str:
    """Return what the bases are, and where all ran."""
    rows = [
        [
            f"{row['seed']:.0f}", f"{row['weights'] / 1e6:.1f} M", f"{row['steps']:,.0f}",
            f"{row['tokens'] / 1e6:.0f} M", f"{row['code_loss']:.3f}", f"{row['text_loss']:.3f}",
        ]
        for row in sorted(base, key=lambda row: row["seed"])
    ]  # fmt: skip
    where = sorted({f"{r['gpu']}, torch {r['torch']}, peft {r['peft']}" for r in runs})
    heading = ("seed", "weights", "steps", "tokens", "loss on code", "loss on text")
    return table(heading, rows) + f"\n{len(runs)} fine-tuning runs; {'; '.join(where)}.\n"


def codec_table(runs: Sequence[Row]) -> str:
    """Return losses by codec, before and after LoRA on experts and attention."""
    exact, rows = by_seed(runs, codec="bf16"), []
    for codec in (*CODECS, "nf4+attention"):
        mine = by_seed(runs, codec=codec)
        before, after = (paired(mine, exact, f"text_{w}") for w in ("before", "after"))
        both = [exact[seed] for seed in mine if seed in exact]
        gained = [row["text_before"] - row["text_after"] for row in both]
        share = [100 * a / g for a, g in zip(after, gained, strict=True)]
        if mine:
            rows.append([
                NAMES[codec], said(values(mine, "text_before"), 3), said(before, signed=True),
                said(values(mine), 3), said(after, signed=True), said(share, 2, signed=True),
            ])  # fmt: skip
    heading = (
        "experts in", "loss before", "over bf16", "loss after", "over bf16",
        "in % of what fine-tuning gains",
    )  # fmt: skip
    return table(heading, rows)


def target_table(runs: Sequence[Row]) -> str:
    """Return losses by what LoRA is on, for each codec."""
    kinds = ("both", "experts", "attention")
    trained = [values(by_seed(runs, targets=kind), "trained") for kind in kinds]
    rows = [["weights trained", *(f"{mean(t):,.0f}" if t else "" for t in trained)]]
    for codec in CODECS:
        cells = [said(values(by_seed(runs, codec=codec, targets=kind)), 3) for kind in kinds]
        if any(cells):
            rows.append([NAMES[codec], *cells])
    return table(("", "experts and attention", "experts", "attention"), rows)


def rank_table(runs: Sequence[Row]) -> str:
    """Return losses by rank."""
    rows = []
    for rank in (4.0, 8.0, 16.0, 32.0, 64.0):
        mine, exact = (by_seed(runs, rank=rank, codec=codec) for codec in ("nf4", "bf16"))
        trained = values(mine, "trained")
        rows.append([
            f"{rank:.0f}", f"{mean(trained):,.0f}" if trained else "", said(values(mine), 3),
            said(values(exact), 3), said(paired(mine, exact), signed=True),
        ])  # fmt: skip
    return table(("r", "weights trained", "NF4", "bf16", "NF4 over bf16"), rows)


def chosen_table(runs: Sequence[Row]) -> str:
    """Return losses by which experts have LoRA."""
    rows = []
    for targets in ("experts", "both"):
        every = by_seed(runs, targets=targets)
        for experts in CHOSEN:
            mine = by_seed(runs, targets=targets, experts=experts)
            if mine:
                both = [every[seed] for seed in mine if seed in every]
                gains = [row["text_before"] - row["text_after"] for row in both]
                lost = paired(mine, every)
                share = [100 * (1 - a / g) for a, g in zip(lost, gains, strict=True)]
                rows.append([
                    targets, experts, f"{mean(values(mine, 'trained')):,.0f}",
                    said(values(mine), 3), said(lost, signed=True), said(share, 1),
                ])  # fmt: skip
    heading = (
        "LoRA on", "of a layer's experts", "weights trained", "loss after", "over all",
        "% of the gain",
    )  # fmt: skip
    return table(heading, rows)


def rate_table(runs: Sequence[Row]) -> str:
    """Return losses by learning rate, as far as the runs came."""
    rates = sorted({row["rate"] for row in runs})
    rows = []
    for codec in CODECS:
        cells = [said(values(by_seed(runs, codec=codec, rate=rate)), 3) for rate in rates]
        if any(cells):
            rows.append([NAMES[codec], *cells])
    names = {row["rate"]: f"{row['learning_rate']:g}" for row in runs}
    return table(("learning rate", *(names[rate] for rate in rates)), rows)


def length_table(runs: Sequence[Row]) -> str:
    """Return losses of short and long fine-tuning."""
    rows = []
    for length in (1.0, 4.0):
        mine, exact = (by_seed(runs, length=length, codec=codec) for codec in ("nf4", "bf16"))
        if mine:
            steps = f"{values(mine, 'steps')[0]:.0f}"
            rows.append([
                steps, said(values(mine), 3), said(values(exact), 3),
                said(paired(mine, exact), signed=True),
            ])  # fmt: skip
    return table(("steps", "NF4", "bf16", "NF4 over bf16"), rows)


def error_table(experts: Sequence[Row]) -> str:
    """Return errors by how much an expert is used: quarters of each layer's experts."""
    groups: dict[str, list[list[Row]]] = defaultdict(lambda: [[], [], [], []])
    layers: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in experts:
        layers[row["codec"], row["seed"], row["layer"]].append(row)
    for (codec, *_), rows in layers.items():
        for place, row in enumerate(sorted(rows, key=lambda row: -row["use_text"])):
            groups[codec][place * 4 // len(rows)].append(row)
    lines = []
    for codec in CODECS[1:]:
        for column, name in (("weight_error", "weights"), ("output_error", "output")):
            cells = [
                [100 * row[column] for row in quarter if isinstance(row[column], float)]
                for quarter in groups[codec]
            ]
            lines.append([NAMES[codec], name, *(f"{mean(c):.2f}" if c else "" for c in cells)])
    heading = ("experts in", "error of, in %", "most used quarter", "second", "third", "least used")
    return table(heading, lines if experts else [])


def token_table(tokens: Sequence[Row]) -> str:
    """Return the loss over bf16 of tokens whose experts are used most, and least."""
    lines = []
    for codec in CODECS[1:]:
        cells = [
            said(_over_bf16(tokens, codec, state, group), signed=True)
            for state in ("before", "after")
            for group in (0.0, 4.0, 9.0)
        ]
        if any(cells):
            lines.append([NAMES[codec], *cells])
    heading = [
        f"{state}, {which}"
        for state in ("before", "after")
        for which in ("most used tenth", "fifth tenth", "rarest tenth")
    ]
    return table(("loss over bf16", *heading), lines)


def _over_bf16(tokens: Sequence[Row], codec: str, state: str, group: float) -> list[float]:
    return [
        row["loss"] - row["bf16_loss"]
        for row in tokens
        if (row["codec"], row["state"], row["group"]) == (codec, state, group)
    ]


# The plots.


def draw(results: Path, runs: Sequence[Row], experts: Sequence[Row], tokens: Sequence[Row]) -> None:
    """Draw every plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "study", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    plots: dict[str, tuple[int, Callable[[Any], None], Sequence[Row]]] = {
        "codecs": (2, lambda axes: _draw_codecs(axes, runs), runs),
        "ranks": (2, lambda axes: _draw_ranks(axes, runs), runs),
        "chosen": (1, lambda axes: _draw_chosen(axes[0], runs), runs),
        "errors": (2, lambda axes: _draw_errors(axes, experts), experts),
        "tokens": (2, lambda axes: _draw_tokens(axes, tokens), tokens),
    }
    from matplotlib import pyplot as plt

    for name, (count, fill_in, rows) in plots.items():
        if rows:
            figure, axes = plt.subplots(1, count, figsize=(4.6 * count + 0.6, 3.6), squeeze=False)
            fill_in(axes[0])
            figure.tight_layout()
            figure.savefig(results / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)


def _draw_codecs(axes: Any, runs: Sequence[Row]) -> None:
    exact = by_seed(runs, codec="bf16")
    for axis, state in zip(axes, ("before", "after"), strict=True):
        present = [c for c in (*CODECS[1:], "nf4+attention") if by_seed(runs, codec=c)]
        for place, codec in enumerate(present):
            differences = paired(by_seed(runs, codec=codec), exact, f"text_{state}")
            if differences:
                axis.bar(place, mean(differences), color=COLORS[codec], alpha=0.75)
                axis.plot([place] * len(differences), differences, "k_", markersize=9)
        axis.set_xticks(range(len(present)), [NAMES[c] for c in present], rotation=30, ha="right")
        axis.set(title=f"{state} fine-tuning", ylabel="held-out loss over bf16, nats")
        axis.axhline(0, color="black", linewidth=0.8)


def _draw_ranks(axes: Any, runs: Sequence[Row]) -> None:
    ranks, rates = (sorted({row[key] for row in runs}) for key in ("rank", "rate"))
    names = {row["rate"]: row["learning_rate"] for row in runs}
    for codec in CODECS:
        for axis, key, places in ((axes[0], "rank", ranks), (axes[1], "rate", rates)):
            points = [
                (place if key == "rank" else names[place], values(found))
                for place in places
                if (found := by_seed(runs, codec=codec, **{key: place}))
            ]
            if len(points) > 1:
                x = [point[0] for point in points]
                axis.plot(x, [mean(p[1]) for p in points], "o-", color=COLORS[codec],
                          label=NAMES[codec], markersize=4)  # fmt: skip
                low, high = ([f(p[1]) for p in points] for f in (min, max))
                axis.fill_between(x, low, high, color=COLORS[codec], alpha=0.12)
    for axis, label in zip(axes, ("r of LoRA", "learning rate"), strict=True):
        axis.set_xscale("log")
        seen = sorted({x for line in axis.lines for x in line.get_xdata()})
        axis.set_xticks(seen, [f"{x:g}" for x in seen])
        axis.minorticks_off()
        axis.set(xlabel=label, ylabel="held-out loss, nats")
        if axis.lines:
            axis.legend(fontsize=8)


def _draw_chosen(axis: Any, runs: Sequence[Row]) -> None:
    every = by_seed(runs, targets="experts")
    bars = [(e, by_seed(runs, targets="experts", experts=e)) for e in CHOSEN]
    bars = [(experts, mine) for experts, mine in bars if mine]
    for place, (_, mine) in enumerate(bars):
        gains = [row["text_before"] - row["text_after"] for row in mine.values()]
        axis.bar(place, mean(gains), color="#1f6fb5", alpha=0.75)
        axis.plot([place] * len(gains), gains, "k_", markersize=9)
    whole = mean(values(every, "trained")) if every else 1.0
    labels = [f"{e}\n{100 * mean(values(m, 'trained')) / whole:.0f} %" for e, m in bars]
    axis.set_xticks(range(len(bars)), labels)
    axis.set(title="LoRA on experts: which, and share of the weights trained")
    axis.set_ylabel("held-out loss gained, nats")


def _draw_errors(axes: Any, experts: Sequence[Row]) -> None:
    for axis, column in zip(axes, ("weight_error", "output_error"), strict=True):
        for codec in CODECS[1:]:
            points = [
                (row["use_text"], 100 * row[column])
                for row in experts
                if row["codec"] == codec and isinstance(row[column], float) and row["use_text"] > 0
            ]
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(x, y, ".", color=COLORS[codec], label=NAMES[codec], alpha=0.5, ms=3)
        axis.set(xscale="log", yscale="log", xlabel="share of the layer's assignments")
        axis.set_ylabel(f"error of an expert's {column.split('_')[0]}s, %")
        axis.legend(fontsize=8, markerscale=3)


def _draw_tokens(axes: Any, tokens: Sequence[Row]) -> None:
    for axis, state in zip(axes, ("before", "after"), strict=True):
        for codec in CODECS[1:]:
            found = {g: _over_bf16(tokens, codec, state, g) for g in map(float, range(10))}
            groups = {group: differences for group, differences in found.items() if differences}
            if groups:
                places = sorted(groups)
                heights = [mean(groups[place]) for place in places]
                axis.plot([1 + p for p in places], heights, "o-", color=COLORS[codec],
                          label=NAMES[codec], markersize=3)  # fmt: skip
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=f"{state} fine-tuning", xlabel="tenth of tokens; 10: rarest experts")
        axis.set_ylabel("loss over bf16, nats")
        axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
