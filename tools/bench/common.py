"""What every benchmark here shares: where it ran, and rows in results/*.csv.

A row is one figure: `name` and `setting` say what was run, `metric` and `unit` what was measured,
p20, p50 and p80 the percentiles over the repetitions (all three equal where it was measured once).
"""

from __future__ import annotations

import csv
import datetime as dt
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "bitsandbytes", "transformers", "peft"),
    *("name", "setting", "metric", "unit", "p20", "p50", "p80"),
)


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Date, commit, device and versions, as every row begins.

    Args:
        device: Where the benchmark runs.
        commit: For a copy of the tree without its history; None asks git.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    row = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "gpu": gpu}
    row["commit"] = commit or _head()
    for package in ("torch", "triton", "bitsandbytes", "transformers", "peft"):
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            row[package] = "none"
    return row


def _head() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile; a single value is all three."""
    if len(values) == 1:
        return (values[0],) * 3
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]


class Rows:
    """Rows of one benchmark run, printed as they come and appended to a CSV file at once.

    Args:
        path: The CSV file; made with a heading where it does not exist.
        where: The start of each row, from `environment`.
        name: What was run.
        setting: How it was run, as `key=value` words.
    """

    def __init__(self, path: Path, where: dict[str, str], name: str, setting: str) -> None:
        self.path = path
        self.start = {**where, "name": name, "setting": setting}

    def add(self, metric: str, unit: str, *values: float) -> None:
        """Record one figure, of one measurement or of several."""
        low, middle, high = (f"{value:.6g}" for value in percentiles(values))
        row = {**self.start, "metric": metric, "unit": unit}
        row |= {"p20": low, "p50": middle, "p80": high}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        print(f"{metric:32s} {middle:>12s} {unit}  (p20 {low}, p80 {high})", flush=True)
