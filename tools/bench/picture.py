"""Draw conversations.png of README.md from rows of results/journey.csv."""

import csv
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
COMMIT, ROWS = "5770bdcc", "same rows, 6 steps"
PEERS = {"ours": "this package", "unsloth-2026.10.9": "Unsloth 2026.10.9"}
SETTINGS = {
    "chat": "one conversation a row,\n8 accumulated",
    "batch8": "8 conversations a batch",
    "bfd": "packing=True",
}

values = {}  # tokens/s by peer and setting: medians over steps
with (HERE / "results/journey.csv").open(newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        part, _, metric = row["metric"].partition(": ")
        same = row["commit"] == COMMIT and row["setting"].endswith(ROWS)
        if same and metric == "real tokens":
            values[row["setting"].split()[0].removeprefix("peer="), part] = float(row["p50"])

figure = Figure(figsize=(8, 2.8), dpi=120, layout="constrained")
axes = figure.add_subplot()
for index, (peer, label) in enumerate(PEERS.items()):
    places = [place + 0.38 * index for place in range(len(SETTINGS))]
    bars = axes.barh(places, [values[peer, key] for key in SETTINGS], 0.36, label=label)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
axes.set_yticks([place + 0.19 for place in range(len(SETTINGS))], list(SETTINGS.values()))
axes.invert_yaxis()
axes.set_xlim(0, 52_000)
axes.set_xlabel("tokens per second")
axes.xaxis.set_major_formatter("{x:,.0f}")
axes.set_title("SFT on conversations, nf4: 16 layers of Qwen3-30B-A3B, one H200")
axes.legend(loc="center right")
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(HERE / "conversations.png")
