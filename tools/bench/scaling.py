"""How long a training step takes on many GPUs; plain arithmetic, for `extrapolate.py`.

A step of one rank takes

    compute    layers x (host's time a layer) + FLOPs / (FLOPs a second), both fitted to one GPU
    engine     layers x (what the engine costs beyond its communication), fitted to two GPUs
    exposed    communication that nothing hides

with these collectives, by the ring formulas, of which a rank moves (n - 1) / n of S bytes:

    ddp    all-reduce of all gradients, hidden behind backward (two thirds of compute)
    fsdp   all-gathers of each layer, in forward and in backward, and the reduce-scatter of its
           gradients, hidden behind compute; the root's all-gather, which is not. Over several
           groups (HSDP), an all-reduce of the shares of gradients, behind backward
    ep     six all-to-alls a layer with experts (two in forward, in the recomputed forward and in
           backward) of tokens x top-k hidden states, hidden by nothing; gradients as under ddp
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NODE = 8
HOPS = {"nvlink": 3e-6, "network": 10e-6}
"""Seconds for one hop of a ring: assumed."""
BACKWARD = 2 / 3  # of compute: forward, forward again and the gradients of activations are alike


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
    resident: float | None  # GB that each rank holds before training
    peak: float | None  # GB at the peak of training


@dataclass(frozen=True)
class Work:
    """What one model's step computes and moves."""

    layers: int
    expert_layers: int
    flops: float  # For one token, forward, recomputed forward and backward
    layer_bytes: float  # Of all layers, packed, with adapters
    root_bytes: float  # Of everything else
    expert_gradients: float  # Bytes of the gradients of LoRA on experts
    other_gradients: float
    row_bytes: int  # Bytes of the hidden states that one token sends to experts


@dataclass(frozen=True)
class Speed:
    """What was fitted to measured rows."""

    host: float  # Seconds a layer, however few tokens
    flops: float  # A second
    engine: dict[str, float]  # Seconds a layer that an engine costs beyond its communication
    bus: float  # Bytes a second between GPUs of one machine


@dataclass(frozen=True)
class Way:
    """One way to train on some GPUs."""

    engine: str  # "single", "ddp", "fsdp" or "ep"
    gpus: int
    group: int  # Ranks that hold one model together

    @property
    def name(self) -> str:
        """As the tables have it."""
        if self.engine in ("single", "ddp"):
            return self.engine
        copies = self.gpus // self.group
        return f"{self.engine} {self.group}" + (f" x {copies} copies" if copies > 1 else "")


def compute(work: Work, tokens: int, host: float, flops: float) -> float:
    """Return the seconds that one GPU computes for so many tokens."""
    return work.layers * host + work.flops * tokens / flops


def ring(nbytes: float, ranks: int, bus: float, network: float, *, across: bool = False) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all.

    The ranks fill nodes one after the other; with `across`, each is on a node of its own. Between
    full nodes there are as many rings as network cards, one for each GPU.
    """
    if ranks < 2:
        return 0.0
    nodes = ranks if across else -(-ranks // NODE)
    wire = bus if nodes == 1 else min(bus, network * (1 if across else NODE))
    hops = (ranks - nodes) * HOPS["nvlink"] + (nodes if nodes > 1 else 0) * HOPS["network"]
    return nbytes * (ranks - 1) / ranks / wire + hops


def all_to_all(nbytes: float, ranks: int, bus: float, network: float) -> float:
    """Return the seconds in which each rank sends so many bytes to all, itself included."""
    near = min(ranks, NODE)
    return nbytes * ((near - 1) / ranks / bus + (ranks - near) / ranks / network)


def exposed(work: Work, way: Way, tokens: int, busy: float, bus: float, network: float) -> float:
    """Return the seconds of communication that `busy` seconds of compute do not hide."""
    backward = BACKWARD * busy
    gradients = work.expert_gradients + work.other_gradients
    copies = way.gpus // way.group if way.group else 1
    if way.engine == "ddp":
        return max(0.0, 2 * ring(gradients, way.gpus, bus, network) - backward)
    if way.engine == "fsdp":
        layers = [
            ring(nbytes / work.layers, way.group, bus, network) * work.layers
            for nbytes in (work.layer_bytes, gradients)
        ]
        sums = 2 * ring(gradients / way.group, copies, bus, network, across=way.group >= NODE)
        root = ring(work.root_bytes, way.group, bus, network)
        return root + max(0.0, 2 * layers[0] + layers[1] - busy) + max(0.0, sums - backward)
    if way.engine == "ep":
        travel = all_to_all(work.row_bytes * tokens, way.group, bus, network)
        own = work.expert_gradients / way.group
        sums = 2 * ring(own, copies, bus, network, across=way.group >= NODE)
        sums += 2 * ring(work.other_gradients, way.gpus, bus, network)
        return 6 * work.expert_layers * travel + max(0.0, sums - backward)
    return 0.0


def step_seconds(work: Work, way: Way, tokens: int, speed: Speed, network: float) -> float:
    """Return the seconds of a step in which each rank has so many tokens."""
    busy = compute(work, tokens, speed.host, speed.flops)
    busy += work.layers * speed.engine.get(way.engine, 0.0)
    return busy + exposed(work, way, tokens, busy, speed.bus, network)


def fit(rows: Sequence[Row], work: Callable[[Row], Work], bus: float) -> Speed:
    """Fit the host's time, FLOPs a second and each engine's cost to measured rows."""
    host, flops = _fit_compute([row for row in rows if row.engine == "single"], work)
    speed = Speed(host, flops, {}, bus)
    costs = {}
    for engine in ("ddp", "fsdp", "ep"):
        extra = [
            (row.step - step_seconds(work(row), way_of(row), row.batch * row.seq, speed, bus))
            / row.layers
            for row in _newest([row for row in rows if row.engine == engine])
        ]
        if extra:
            costs[engine] = max(0.0, statistics.median(extra))
    return Speed(host, flops, costs, bus)


def way_of(row: Row) -> Way:
    """Return how a measured run was trained."""
    return Way(row.engine, row.gpus, row.gpus if row.engine in ("fsdp", "ep") else 1)


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first file that has any."""
    return [row for row in rows if row.source == rows[0].source]


def _fit_compute(rows: Sequence[Row], work: Callable[[Row], Work]) -> tuple[float, float]:
    """Return (seconds a layer, FLOPs a second) with the least squares of relative errors."""
    points = [
        (row.layers / row.step, work(row).flops * row.batch * row.seq / row.step) for row in rows
    ]
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(point[i] for point in points) for i in (0, 1))
    host = (a * bb - b * ab) / (aa * bb - ab * ab)
    if host <= 0:  # too few rows of few tokens
        return 0.0, bb / b
    return host, 1 / ((b - ab * host) / bb)
