"""What every benchmark here shares: where it ran, rows in results/*.csv, times and memory.

A row is one figure: `name` and `setting` say what was run, `metric` and `unit` what was measured,
p20, p50 and p80 the percentiles over the repetitions (all three equal where it was measured once).
A run that fails is a row too: metric `fails: <what was raised>`, no figures.
"""

import argparse
import csv
import datetime as dt
import gc
import math
import statistics
import subprocess
import time
import timeit
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_qlora.kernels.workspace import release_workspace
from moe_qlora.versions import installed_version

RESULTS = Path(__file__).parent / "results"
FLOPS = 790e12  # bf16 matrix products a second on an H200, measured
PACKAGES = ("torch", "triton", "bitsandbytes", "transformers", "peft")
FIGURES = ("name", "setting", "metric", "unit", "p20", "p50", "p80")
COLUMNS = ("date", "commit", "gpu", *PACKAGES, *FIGURES)


def today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def head() -> str:
    """The commit of this checkout, in short."""
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Date, commit (None asks git), device and versions, as every row begins."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {package: installed_version(package) or "none" for package in PACKAGES}
    return {"date": today(), "commit": commit or head(), "gpu": gpu, **versions}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile; a single value is all three."""
    fifths = statistics.quantiles([*values] * (1 + (len(values) == 1)), n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]


def parser_of(doc: str | None, out: str, device: str = "cuda") -> argparse.ArgumentParser:
    """A parser with the options of every benchmark, whose rows go to results/`out`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--tiny", action="store_true", help="whether it runs at all")
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    return parser


def words(*known: str) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these words, by commas."""

    def read(text: str) -> list[str]:
        if unknown := sorted({*text.split(",")} - {*known}):
            told = f"{', '.join(unknown)}: expected some of {', '.join(known)}"
            raise argparse.ArgumentTypeError(told)
        return text.split(",")

    return read


def append_row(path: Path, columns: Sequence[str], row: dict[str, Any]) -> None:
    """Append a row to a CSV file, which is made with a heading where it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


class Rows:
    """Rows of one run, printed as they come and appended to the CSV file `options.out` at once."""

    def __init__(self, options: argparse.Namespace, name: str, setting: str) -> None:
        self.path, where = options.out, environment(options.device, options.commit)
        self.start = {**where, "name": name, "setting": setting}
        print(f"\n{name} {setting}", flush=True)

    def add(self, metric: str, unit: str, *values: float) -> None:
        """Record one figure, of one measurement or of several."""
        low, middle, high = (f"{value:.6g}" for value in percentiles(values))
        row = {"metric": metric, "unit": unit, "p20": low, "p50": middle, "p80": high}
        append_row(self.path, COLUMNS, self.start | row)
        print(f"{metric:32s} {middle:>12s} {unit}  (p20 {low}, p80 {high})", flush=True)

    def add_bytes(self, metric: str, count: int) -> None:
        """Record bytes, where a device counts them."""
        if count:
            self.add(metric, "bytes", count)

    @contextmanager
    def attempt(self, ours: bool) -> Iterator[None]:
        """Raise an error of ours; record that a peer's run fails, and how it says so."""
        try:
            yield
        except Exception as error:
            if ours:
                raise
            traceback.print_exc(limit=-6)
            said = (str(error).strip().splitlines() or [""])[0]
            metric = f"fails: {type(error).__name__}: {said}"[:200].strip(": ")
            self.add(metric, "none", math.nan)


def recompute(model: Any) -> None:
    """Checkpoint gradients, by the name from transformers 5.24 on and before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def train(
    model: Any, optimizer: Any, draw: Callable[[int], Tensor], steps: int, **more: Any
) -> tuple[list[float], list[float]]:
    """Train on the tokens that `draw` returns for each step; return the seconds and the losses."""
    seconds, losses = [], []
    for number in range(steps):
        ids = draw(number)
        synchronize(ids.device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(ids.device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())  # at once: a graph's next replay writes where it lies
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    return seconds, losses


def times(run: Callable[[], Any], device: torch.device, repeat: int) -> list[float]:
    """Milliseconds of calls one behind the other, as a model's layers are, after five more.

    On a GPU the host's own time shows where it is the longer.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return [1e3 * timeit.timeit(run, number=1) for _ in range(repeat)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks[2:])]


def allocated(device: torch.device) -> int:
    """Bytes that torch's allocator has given out; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """The most bytes that were allocated since `release`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device, workspace: bool = False) -> None:
    """Give back what nobody holds any more, and measure the peak from here.

    The kernels' workspace too, between models: graphs that were recorded hold its addresses.
    """
    if workspace:
        release_workspace()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
