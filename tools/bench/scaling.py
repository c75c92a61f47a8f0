"""Reads measured steps, and fits the arithmetic of `moe_qlora.memory.scaling` to them.

FLOPs a second and the host's time a layer come from runs of one GPU; what an engine costs a layer
beyond its communication is the median over its runs. `scaling.MEASURED` has the results, rounded.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import RESULTS

from moe_qlora.memory.scaling import Links, Speed, Way, Work, step_seconds

PROTOTYPE = "two_gpu_first.csv"
SEQ, RANK = 4096, 16


@dataclass(frozen=True)
class Row:
    """One measured run."""

    source: str  # Name of its file
    engine: str  # "single", "ddp", "fsdp" or "ep"
    label: str  # As the file names it
    gpus: int
    model: str
    layers: int
    seq: int
    batch: int
    step: float  # Seconds
    adapters: str  # Their dtype
    resident: float | None = None  # GB that each rank holds before training
    peak: float | None = None  # GB at the peak of training
    linears: bool = False  # Whether Linear layers are packed
    fitted: bool = True  # Whether the arithmetic is fitted to it
    gathers: bool = True  # Whether expert parallelism gathers tokens


_ENGINE = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "whole": "fsdp", "ep": "ep"}
_STOCK = re.compile(
    rf"layers=(\d+) lora=experts,attention r={RANK} seq={SEQ} batch=(\d+) "
    r"checkpointing=non-reentrant nf4\+double( peer=ours adapters=bf16)?"
)


def read_rows(folder: Path = RESULTS) -> list[Row]:
    """Return the runs of two GPUs, and of one GPU with the same settings.

    Left out are runs that failed, kept layers gathered, or trained something else. The arithmetic
    is fitted to all but those of the prototype, and those whose optimizer's step was another.
    """
    return [*_two_gpus(folder, "two_gpu.csv"), *_one_gpu(folder), *_two_gpus(folder, PROTOTYPE)]


def _two_gpus(folder: Path, name: str) -> Iterator[Row]:
    for line in _lines(folder / name):
        engine, note = line["engine"], line.get("note") or ""
        measured = line["step_s"] or line["tokens_per_s"]
        usual = "LoRA" not in note or f"r={RANK} experts,attention" in note
        kept = "no reshard" in note or "keep" in note
        if engine not in _ENGINE or not measured or not usual or kept:
            continue
        gpus, batch, seq = (int(line[key]) for key in ("gpus", "micro_batch", "seq"))
        step = float(line["step_s"] or gpus * batch * seq / float(line["tokens_per_s"]))
        sizes = [float(line[k]) if line[k] else None for k in ("model_gb", "train_peak_gb")]
        yield Row(
            name, _ENGINE[engine], engine, gpus, line["model"], int(line["layers"]), seq, batch,
            step, line.get("adapters") or "bfloat16", resident=sizes[0], peak=sizes[1],
            linears="Linear layers packed" in note,
            fitted=name != PROTOTYPE and "fused" not in note,
            gathers="all-to-all" not in note,
        )  # fmt: skip


def _one_gpu(folder: Path) -> Iterator[Row]:
    """Yield the quickest run of each size: what made the others slow was the host."""
    steps: dict[tuple[str, int, int], float] = {}
    for line in _lines(folder / "model.csv"):
        setting = _STOCK.fullmatch(line["setting"])
        if setting is None or line["metric"] != "step":
            continue
        size = (line["name"], int(setting[1]), int(setting[2]))
        steps[size] = min(float(line["p50"]), steps.get(size, math.inf))
    for (model, layers, batch), step in steps.items():
        yield Row("model.csv", "single", "single", 1, model, layers, SEQ, batch, step, "bfloat16")


def bus_bandwidth(folder: Path = RESULTS) -> float:
    """Return the bytes a second that a GPU moves in an all-gather, measured within one machine."""
    lines = _lines(folder / "two_gpu_comm.csv") or _lines(folder / "two_gpu_comm_first.csv")
    gathers = [line for line in lines if line["operation"] == "all_gather"]
    largest = max(gathers, key=lambda line: int(line["nbytes"]))
    ranks, nbytes = int(largest["gpus"]), int(largest["nbytes"])
    return nbytes * (ranks - 1) / ranks / float(largest["seconds"])


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def way_of(row: Row) -> Way:
    """Return how a measured run was trained."""
    group = row.gpus if row.engine in ("fsdp", "ep") else 1
    return Way(row.engine, row.gpus, group, row.gathers)


def row_seconds(row: Row, work: Work, speed: Speed, links: Links) -> float:
    """Return the seconds of a measured run by arithmetic."""
    return step_seconds(work, way_of(row), row.batch * row.seq, speed, links)


def fit(rows: Sequence[Row], work: Callable[[Row], Work], links: Links) -> Speed:
    """Fit the host's time, FLOPs a second and each engine's cost to measured rows."""
    rows = [row for row in rows if row.fitted]
    speed = _fit_compute([row for row in rows if row.engine == "single"], work)
    extra: dict[str, list[float]] = {}
    for row in rows:
        if row.engine != "single":
            seconds = row.step - row_seconds(row, work(row), speed, links)
            extra.setdefault(way_of(row).cost, []).append(seconds / row.layers)
    costs = {name: max(0.0, statistics.median(seconds)) for name, seconds in extra.items()}
    return replace(speed, engine=costs)


def _fit_compute(rows: Sequence[Row], work: Callable[[Row], Work]) -> Speed:
    """Return the speed of one GPU with the least squares of relative errors."""
    points = []
    for row in rows:
        flops, tokens = work(row), row.batch * row.seq
        parts = (row.layers, flops.expert_flops * tokens, flops.other_flops * tokens)
        points.append([part / row.step for part in parts])
    made = torch.tensor(points, dtype=torch.float64)
    scale = made.max(dim=0).values
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    found = torch.linalg.lstsq(made / scale, ones, driver="gelsd").solution[:, 0] / scale
    host, experts, others = found.tolist()
    return Speed(host, 1 / experts, 1 / others, {})
