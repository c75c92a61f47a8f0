"""The study's rows: reading them, comparing runs of one seed, and the tables of README.md."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .grid import CODECS

NAMES = {
    "nf4-dq": "NF4, double quantized", "nf4": "NF4", "fp4": "FP4", "int8": "int8",
    "mxfp4": "MXFP4", "bf16": "bf16", "nf4+attention": "NF4, attention too",
}  # fmt: skip
BITS = {"bf16": 16, "int8": 8.13, "nf4": 4.5, "nf4-dq": 4.13, "fp4": 4.5, "mxfp4": 4.25}
"""Of a weight of the study's experts, statistics included; in int8 one float for a row of 256."""
CHOSEN = ("all", "by use", "hot-50", "hot-25", "random-25", "cold-25")
RANKS = (4.0, 8.0, 16.0, 32.0, 64.0)

Row = dict[str, Any]


def tables(results: Path) -> dict[str, str]:
    """Return every table of the page by name, of the rows in a folder."""
    runs, base = read(results / "runs.csv"), read(results / "base.csv")
    experts, tokens = read(results / "experts.csv"), read(results / "tokens.csv")
    return {
        "base": base_table(base, runs),
        "codecs": codec_table(runs),
        "pairs": pair_table(runs),
        "targets": target_table(runs),
        "ranks": rank_table(runs),
        "rates": rate_table(runs),
        "use": use_table(experts),
        "chosen": chosen_table(runs),
        "sizes": size_table(runs),
        "errors": error_table(experts),
        "tokens": token_table(tokens),
    }


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


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """Return a page with each table between its marks, `<!-- name -->` and `<!-- end -->`."""
    for name, block in blocks.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, mark, rest = page.partition(start)
        if mark:
            page = before + start + block + end + rest.partition(end)[2]
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


def gains(runs: dict[int, Row]) -> list[float]:
    """Return what fine-tuning takes off the held-out loss."""
    return [row["text_before"] - row["text_after"] for row in runs.values()]


def shares(runs: dict[int, Row], whole: dict[int, Row]) -> list[float]:
    """Return each seed's gain in percent of that of another run of the seed."""
    seeds = sorted({*runs} & {*whole})
    mine, theirs = ([gains({0: each[seed]})[0] for seed in seeds] for each in (runs, whole))
    return [100 * a / b for a, b in zip(mine, theirs, strict=True)]


def over_all_settings(runs: Sequence[Row], codec: str, other: str) -> list[float]:
    """Return the differences after fine-tuning of all pairs of runs that differ in codec alone."""
    keys = ("seed", "targets", "rank", "experts", "rate", "length")
    losses: dict[str, dict[tuple[Any, ...], float]] = defaultdict(dict)
    for row in runs:
        losses[row["codec"]][tuple(row[key] for key in keys)] = row["text_after"]
    both = sorted({*losses[codec]} & {*losses[other]})
    return [losses[codec][each] - losses[other][each] for each in both]


def said(numbers: Sequence[float], digits: int = 4, *, signed: bool = False) -> str:
    """Return the mean and the range, as a table says them."""
    if not numbers:
        return ""
    sign = "+" if signed else ""
    text = f"{mean(numbers):{sign}.{digits}f}"
    if len(numbers) > 1:
        text += f" ({min(numbers):{sign}.{digits}f} to {max(numbers):{sign}.{digits}f})"
    return text


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; nothing where there are no rows."""
    lines = [f"| {' | '.join(line)} |\n" for line in (heading, ["---"] * len(heading), *rows)]
    return "".join(lines) if len(lines) > 2 else ""


# The tables.


def base_table(base: Sequence[Row], runs: Sequence[Row]) -> str:
    """Return what the bases are, and where all ran."""
    rows = []
    for row in sorted(base, key=lambda row: row["seed"]):
        last = [float(loss) for loss in str(row["losses"]).split()[-4:]]
        rows.append([
            f"{row['seed']:.0f}", f"{row['weights'] / 1e6:.1f} M", f"{row['steps']:,.0f}",
            f"{row['tokens'] / 1e6:.0f} M", f"{mean(last):.2f}",
            f"{row['code_loss']:.3f}", f"{row['text_loss']:.3f}",
        ])  # fmt: skip
    where = sorted({f"{r['gpu']}, torch {r['torch']}, peft {r['peft']}" for r in runs})
    heading = (
        "seed", "weights", "steps", "tokens", "last losses in training", "held-out code",
        "held-out text",
    )  # fmt: skip
    return table(heading, rows) + f"\n{len(runs)} fine-tuning runs; {'; '.join(where)}.\n"


def codec_table(runs: Sequence[Row]) -> str:
    """Return losses by codec, before and after LoRA on experts and attention."""
    exact, rows = by_seed(runs, codec="bf16"), []
    for codec in (*CODECS, "nf4+attention"):
        mine = by_seed(runs, codec=codec)
        if not mine:
            continue
        columns = ("code_before", "text_before", "text_after")
        over = [said(paired(mine, exact, c), signed=True) for c in columns]
        if codec == "bf16":
            over = [said(values(mine, c), 3) for c in columns]
        bits = f"{BITS[codec]:g}" if codec in BITS else f"{BITS['nf4']:g}"
        rows.append([NAMES[codec], bits, *over])
    heading = (
        "experts in", "bits a weight", "code, before", "text, before", "text, after fine-tuning",
    )  # fmt: skip
    return table(heading, rows)


def pair_table(runs: Sequence[Row]) -> str:
    """Return what each codec costs over all settings that were run with both of a pair."""
    rows = []
    for codec in CODECS[1:]:
        cells: list[str] = []
        for other in ("bf16", "int8"):
            differences = over_all_settings(runs, codec, other) if codec != other else []
            worse = sum(each > 0 for each in differences)
            cells += [
                said(differences, signed=True),
                f"{worse} of {len(differences)}" if differences else "",
            ]
        rows.append([NAMES[codec], *cells])
    heading = ("experts in", "over bf16", "pairs that are worse", "over int8", "that are worse")
    return table(heading, rows if runs else [])


def target_table(runs: Sequence[Row]) -> str:
    """Return losses by what LoRA is on, for each codec."""
    kinds = ("both", "experts", "attention")
    each = [by_seed(runs, targets=kind) for kind in kinds]
    rows = [
        ["weights trained", *(f"{mean(values(m, 'trained')):,.0f}" if m else "" for m in each)],
        ["gain, in % of both", *(said(shares(m, each[0]), 1) for m in each)],
        ["loss on code after", *(said(values(m, "code_after"), 3) for m in each)],
    ]
    for codec in CODECS:
        cells = [said(values(by_seed(runs, codec=codec, targets=kind)), 3) for kind in kinds]
        if any(cells):
            rows.append([f"loss on text after, {NAMES[codec]}", *cells])
    return table(("", "experts and attention", "experts", "attention"), rows)


def rank_table(runs: Sequence[Row]) -> str:
    """Return losses by rank."""
    rows = []
    for rank in RANKS:
        mine, exact = (by_seed(runs, rank=rank, codec=codec) for codec in ("nf4", "bf16"))
        if mine:
            rows.append([
                f"{rank:.0f}", f"{mean(values(mine, 'trained')):,.0f}", said(values(mine), 3),
                said(paired(mine, exact), signed=True), said(values(mine, "code_after"), 3),
            ])  # fmt: skip
    return table(("r", "weights trained", "NF4, text", "over bf16", "NF4, code"), rows)


def rate_table(runs: Sequence[Row]) -> str:
    """Return losses by learning rate, and the other codecs' differences from bf16's."""
    names = {row["rate"]: f"{row['learning_rate']:g}" for row in runs}
    exact = {rate: by_seed(runs, codec="bf16", rate=rate) for rate in sorted(names)}
    rows = [
        ["bf16, loss on code", *(said(values(e, "code_after"), 3) for e in exact.values())],
        ["bf16, loss on text", *(said(values(e), 3) for e in exact.values())],
    ]
    for codec in CODECS[1:]:
        cells = []
        for rate, whole in exact.items():
            differences = paired(by_seed(runs, codec=codec, rate=rate), whole)
            seeds = f", {len(differences)} of {len(whole)} seeds"
            short = 0 < len(differences) < len(whole)
            cells.append(said(differences, signed=True) + (seeds if short else ""))
        if any(cells):
            rows.append([f"{NAMES[codec]}, text, over bf16", *cells])
    return table(("learning rate", *(names[rate] for rate in exact)), rows)


def use_table(experts: Sequence[Row]) -> str:
    """Return how unequally a layer's experts are used, over layers and seeds."""
    layers = by_layer(experts, CODECS[1])
    parts = {"most used quarter": (0, 1), "most used half": (0, 2), "least used quarter": (3, 4)}
    rows = []
    for name, (first, last) in parts.items():
        cells = []
        for column in ("use_text", "use_code"):
            shared = [sorted((row[column] for row in layer), reverse=True) for layer in layers]
            cells.append([100 * sum(u[len(u) * first // 4 : len(u) * last // 4]) for u in shared])
        rows.append([name, *(said(cell, 1) for cell in cells)])
    heading = ("of a layer's experts", "% of assignments on text", "on code")
    return table(heading, rows if layers else [])


def chosen_table(runs: Sequence[Row]) -> str:
    """Return losses by which experts have LoRA."""
    rows = []
    for targets in ("experts", "both"):
        every = by_seed(runs, targets=targets)
        for experts in CHOSEN:
            mine = by_seed(runs, targets=targets, experts=experts)
            if mine:
                rows.append([
                    targets, experts, f"{mean(values(mine, 'trained')):,.0f}",
                    said(values(mine), 3), said(paired(mine, every), 3, signed=True),
                    said(shares(mine, every), 1), said(values(mine, "code_after"), 3),
                ])  # fmt: skip
    heading = (
        "LoRA on", "which experts", "weights trained", "loss on text", "over all",
        "gain, in % of all", "loss on code",
    )  # fmt: skip
    return table(heading, rows)


def sizes(runs: Sequence[Row]) -> list[tuple[str, dict[int, Row]]]:
    """Return the NF4 runs of the main learning rate and length, fewest trained weights first."""
    kinds = {(row["targets"], row["rank"], row["experts"]) for row in runs}
    named = []
    for targets, rank, experts in kinds:
        mine = by_seed(runs, targets=targets, rank=rank, experts=experts)
        if mine:
            what = {"both": "attention + experts"}.get(targets, targets)
            some = "" if experts == "all" else f", {experts}"
            named.append((f"{what}{some}, r={rank:.0f}", mine))
    return sorted(named, key=lambda each: (mean(values(each[1], "trained")), each[0]))


def size_table(runs: Sequence[Row]) -> str:
    """Return losses by the number of weights trained."""
    rows = [
        [
            f"{mean(values(mine, 'trained')):,.0f}", name, said(values(mine), 3),
            said(values(mine, "code_after"), 3),
        ]
        for name, mine in sizes(runs)
    ]  # fmt: skip
    return table(("weights trained", "LoRA on", "loss on text", "loss on code"), rows)


def by_layer(experts: Sequence[Row], codec: str) -> list[list[Row]]:
    """Return the experts of each layer of each seed, the most used on the text first."""
    layers: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in experts:
        if row["codec"] == codec:
            layers[row["seed"], row["layer"]].append(row)
    return [sorted(rows, key=lambda row: -row["use_text"]) for _, rows in sorted(layers.items())]


def grouped(layer: Sequence[Row], column: str, count: int) -> list[float | None]:
    """Return a layer's mean error, in %, by groups of its experts, the most used first.

    None is the mean of a group whose experts all got no token of the held-out text.
    """
    groups: list[list[float]] = [[] for _ in range(count)]
    for place, row in enumerate(layer):
        if isinstance(row[column], float):
            groups[place * count // len(layer)].append(100 * row[column])
    return [mean(group) if group else None for group in groups]


def error_table(experts: Sequence[Row]) -> str:
    """Return errors by how much an expert is used: quarters of each layer's experts."""
    lines = []
    for codec in CODECS[1:]:
        for column, name in (("weight_error", "weights"), ("output_error", "output")):
            layers = [grouped(layer, column, 4) for layer in by_layer(experts, codec)]
            cells = [[m for layer in layers if (m := layer[place])] for place in range(4)]
            ratios = [last / first for first, *_, last in layers if first and last]
            if layers:
                means = (f"{mean(cell):.2f}" if cell else "" for cell in cells)
                lines.append([NAMES[codec], name, *means, said(ratios, 2)])
    heading = (
        "experts in", "error of, in %", "most used quarter", "second", "third", "least used",
        "least over most used, by layer",
    )  # fmt: skip
    return table(heading, lines)


def token_table(tokens: Sequence[Row]) -> str:
    """Return how much more a codec costs tokens with rarely used experts than others."""
    lines = []
    for codec in (*CODECS[1:], "nf4+attention"):
        cells = []
        for state in ("before", "after"):
            seeds = over_bf16(tokens, codec, state).values()
            cells += [
                said([mean(g[5:]) - mean(g[:5]) for g in seeds], signed=True),
                said([g[9] - mean(g[:9]) for g in seeds], signed=True),
            ]
        if any(cells):
            lines.append([NAMES[codec], *cells])
    heading = (
        "experts in", "before, rarer half over other half", "before, rarest tenth over the rest",
        "after, rarer half over other half", "after, rarest tenth over the rest",
    )  # fmt: skip
    return table(heading, lines)


def over_bf16(tokens: Sequence[Row], codec: str, state: str) -> dict[int, list[float]]:
    """Return for each seed the loss over bf16 of ten groups of tokens, rarest experts last."""
    seeds: dict[int, dict[float, float]] = defaultdict(dict)
    for row in tokens:
        if (row["codec"], row["state"]) == (codec, state):
            seeds[int(row["seed"])][row["group"]] = row["loss"] - row["bf16_loss"]
    return {seed: [groups[g] for g in sorted(groups)] for seed, groups in sorted(seeds.items())}
