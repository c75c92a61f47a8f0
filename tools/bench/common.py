"""What every benchmark here shares: where it ran, rows in results/*.csv, times and memory.

A row is one figure: `name` and `setting` say what was run, `metric` and `unit` what was measured,
p20, p50 and p80 the percentiles over the repetitions (all three equal where it was measured once).
A run that fails is a row too: metric `fails: <what was raised>`, no figures.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FLOPS = 790e12  # bf16 matrix products a second on an H200, measured
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "bitsandbytes", "transformers", "peft"),
    *("name", "setting", "metric", "unit", "p20", "p50", "p80"),
)


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Date, commit (None asks git), device and versions, as every row begins."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    row = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "gpu": gpu}
    row["commit"] = commit or head()
    for package in ("torch", "triton", "bitsandbytes", "transformers", "peft"):
        try:
            row[package] = version(package)
        except PackageNotFoundError:
            row[package] = "none"
    return row


def head() -> str:
    """The commit of this checkout, in short."""
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


def parser_of(doc: str | None, out: str, device: str = "cuda") -> argparse.ArgumentParser:
    """A parser with the options of every benchmark, whose rows go to results/`out`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default=device)
    parser.add_argument("--tiny", action="store_true", help="whether it runs at all")
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    return parser


def words_of(
    parser: argparse.ArgumentParser, option: str, words: str, known: Sequence[str]
) -> list[str]:
    """The words of an option, by commas; an unknown one ends the program."""
    found = words.split(",")
    unknown = sorted(set(found) - set(known))
    if unknown:
        parser.error(f"{option} {', '.join(unknown)}: expected some of {', '.join(known)}")
    return found


def append_row(path: Path, columns: Sequence[str], row: dict[str, Any]) -> None:
    """Append a row to a CSV file, which is made with a heading where it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def recompute(model: Any) -> None:
    """Checkpoint gradients, by the name from transformers 5.24 on and before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


class Rows:
    """Rows of one benchmark run, printed as they come and appended to a CSV file at once.

    `where` comes from `environment`; `setting` says how `name` was run, as `key=value` words.
    """

    def __init__(self, path: Path, where: dict[str, str], name: str, setting: str) -> None:
        self.path = path
        self.start = {**where, "name": name, "setting": setting}

    def add(self, metric: str, unit: str, *values: float) -> None:
        """Record one figure, of one measurement or of several."""
        low, middle, high = (f"{value:.6g}" for value in percentiles(values))
        self._write(metric, unit, low, middle, high)
        print(f"{metric:32s} {middle:>12s} {unit}  (p20 {low}, p80 {high})", flush=True)

    def fail(self, error: BaseException) -> None:
        """Record that what was to be measured cannot be run, and how it says so."""
        said = (str(error).strip().splitlines() or [""])[0]
        metric = f"fails: {type(error).__name__}: {said}"[:200].strip(": ")
        self._write(metric, "none", "nan", "nan", "nan")
        print(metric, flush=True)

    def _write(self, metric: str, unit: str, low: str, middle: str, high: str) -> None:
        row = {**self.start, "metric": metric, "unit": unit}
        row |= {"p20": low, "p50": middle, "p80": high}
        append_row(self.path, COLUMNS, row)


def times(run: Callable[[], Any], device: torch.device, repeat: int) -> list[float]:
    """Milliseconds of calls one behind the other, as a model's layers are, after five more.

    On a GPU the host's own time shows where it is the longer.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(repeat):
            run()
            clock.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks[2:])]


def allocated(device: torch.device) -> int:
    """Bytes that torch's allocator has given out; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what nobody holds any more, and measure the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
