"""Measures what memory gives in speed: models fitted to limits, or offloaded, and bf16; model.csv.

    python tools/bench/fit_table.py                          one H200, within nine minutes
    python tools/bench/fit_table.py --only one,one-frozen    some of them
    python tools/bench/fit_table.py --tiny --device cpu      whether it runs, without a GPU's part

Each case is a process of `model.py`, one after the other, with a time limit; the first that
compiles leaves its code on disk for the next. The most important come first, so that a case for
which no time is left costs least. A line is printed as soon as a case has ended. A limit is never
exceeded where "reserved" is at most "memory"; "plan" is how far the planned peak was off.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import parser_of, words_of
from model import KINDS

GB = 1e9
HEADER = ("case", "tokens/s", "peak", "reserved", "memory", "plan", "keep/part/again", "seconds")
STARTS = 10.0
"""Seconds below which no case is worth a start."""

FAST = "--liger-loss --chunk-mem-const 8 --compile --optimizer adamw_fused"
FIT = "--optimizer adamw_fused --prepare"
FLEX = f"--attention flex_attention {FIT}"
LOSSES = "--losses 30 --steps 26"
SMALL = "--steps 6 --warmup 3"
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Case:
    """One setting.

    Attributes:
        name: Short.
        peer: As `model.py` calls it.
        additions: Options of `model.py` that need a GPU.
        options: Its other options.
        limit: The most seconds that it may take, imports and compiling included.
        expandable: Whether torch's allocator has expandable segments: fewer gaps, for small limits.
    """

    name: str
    peer: str
    additions: str
    options: str = ""
    limit: float = 80.0
    expandable: bool = False


CASES = (
    Case("one", "ours", FIT, LOSSES, 120),
    Case("one-frozen", "frozen", FAST, "--no-checkpointing", 100),
    Case("four", "ours", FIT, "--micro-batch 4"),
    Case("one-28GiB", "ours", f"{FIT} 28GiB", LOSSES, 110, True),
    Case("one-24GiB", "ours", f"{FIT} 24GiB", LOSSES, 110, True),
    Case("one-attention", "ours", FIT, "--lora attention"),
    Case("four-76GiB", "ours", f"{FIT} 76GiB", "--micro-batch 4"),
    Case("four-55.8GiB", "ours", f"{FIT} 55.8GiB", "--micro-batch 4", 150, True),
    Case("four-58.1GiB", "ours", f"{FIT} 58.1GiB", "--micro-batch 4", 150, True),
    Case("four-frozen-recomputed", "frozen", FAST, "--micro-batch 4"),
    Case("long-80GiB", "ours", f"{FIT} 80GiB", "--seq 32768 --steps 4 --warmup 4", 190, True),
    Case("oss-one", "ours", FLEX, "--model gpt-oss-20b", 110),
    Case("oss-four", "ours", FLEX, "--model gpt-oss-20b --micro-batch 4", 140),
    Case("host-8GiB", "ours", f"{FIT} 8GiB --offload", SMALL, 120, True),
    Case("host-12GiB", "ours", f"{FIT} 12GiB --offload", SMALL, 120, True),
    Case("host-23GiB", "ours", f"{FIT} 23GiB --offload", SMALL, 120, True),
    Case("one-peft", "peft", FAST, "--no-checkpointing"),
    Case("four-peft-recomputed", "peft", FAST, "--micro-batch 4"),
)
"""By importance: fitted to memory, bf16 at its best, other models; `host-` has experts in host
memory."""


def main() -> None:
    """Run the cases that the command line asks for."""
    options = _options()
    named = {case.name: case for case in CASES}
    cases = [named[name] for name in options.only]
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
    end = time.monotonic() + options.within
    for case in cases:
        left = end - time.monotonic()
        start = time.monotonic()
        said = "no time left" if left < STARTS else run(case, options, min(left, case.limit))
        seconds = f"{time.monotonic() - start:.0f}"
        print(line(case.name, said, seconds), flush=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "model.csv")
    parser.add_argument("--within", type=float, default=540, help="seconds for all cases")
    parser.add_argument(
        "--only", default="", help="names of cases, by commas, in this order; default: all"
    )
    parser.add_argument("--layers", type=int, help="default: all")
    log = Path(tempfile.gettempdir()) / "fit_table.log"
    parser.add_argument("--log", type=Path, default=log, help=f"default: {log}")
    options = parser.parse_args()
    names = [case.name for case in CASES]
    options.only = words_of(parser, "--only", options.only or ",".join(names), names)
    return options


def command(case: Case, options: argparse.Namespace) -> list[str]:
    """The call of `model.py` for a case; on a CPU without what needs a GPU."""
    script = Path(__file__).with_name("model.py")
    call = [sys.executable, "-u", str(script), "--peers", case.peer, "--steps", "10"]
    call += ["--warmup", "4", *case.options.split()]
    call += case.additions.split() if options.device != "cpu" else []
    call += ["--device", options.device, "--out", str(options.out)]
    call += ["--tiny"] if options.tiny else []
    call += ["--layers", str(options.layers)] if options.layers else []
    return call + (["--commit", options.commit] if options.commit else [])


def run(case: Case, options: argparse.Namespace, limit: float) -> dict[str, float] | str:
    """Run a case in a process of its own, whose output goes to the log.

    Returns:
        The median of each metric that it recorded, or why there is no speed among them.
    """
    before = len(_rows(options.out))
    with options.log.open("a", encoding="utf-8") as log:
        log.write(f"\n== {case.name}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command(case, options),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(EXPANDABLE if case.expandable else {})},
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not within {limit:.0f} s"
        finally:
            if process.poll() is None:  # with compilers that it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = {row["metric"]: float(row["p50"]) for row in _rows(options.out)[before:]}
    if process.returncode == 0 and "throughput" in found:
        return found
    failed = next((metric for metric in found if metric.startswith("fails: ")), "")
    with options.log.open("rb") as log_of_case:
        log_of_case.seek(start)
        said = log_of_case.read().decode(errors="replace").split("\n")
    return failed or next((words for words in reversed(said) if words.strip()), "ended silently")


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def line(name: str, found: dict[str, float] | str, seconds: str) -> str:
    """A case's line of the table."""
    if isinstance(found, str):
        blank = [""] * (len(HEADER) - 3)
        return f"| {' | '.join((name, found.replace('|', '/'), *blank, seconds))} |"
    sizes = ("peak in training", "reserved in training", "memory to fit")
    gigabytes = (f"{found[size] / GB:.2f} GB" if size in found else "-" for size in sizes)
    error = found.get("planned peak, error")
    layers = [found[metric] for metric in KINDS.values() if metric in found]
    cells = (
        name,
        f"{found['throughput']:,.0f}",
        *gigabytes,
        "-" if error is None else f"{error:+.1f} %",
        "/".join(f"{count:.0f}" for count in layers) or "-",
        seconds,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
