"""How long a training step takes on several GPUs; plain arithmetic, free of torch.

A step of one micro-batch on each rank takes

    compute    layers x (host's time a layer) + FLOPs / (FLOPs a second), of experts and of the rest
    engine     layers x (what the engine costs beyond its communication)
    exposed    communication that nothing hides

with these collectives, by the ring formulas, of which a rank moves (n - 1) / n of S bytes:

    ddp    all-reduce of all gradients, hidden behind backward (two thirds of compute)
    fsdp   all-gathers of each layer, in forward and in backward, the reduce-scatter of its
           gradients and the root's all-gather. Nothing is taken to be hidden: on two H200s a step
           with one all-gather less was shorter by all of its time. Over several groups (HSDP), an
           all-reduce of the shares of gradients, behind backward
    ep     tokens to their experts and back, in forward, recomputed forward and backward of each
           layer with experts, hidden by nothing: all-gathers and reduce-scatters of hidden states
           on up to `GATHERED` ranks, all-to-alls of tokens x top-k hidden states on more;
           gradients as under ddp

`MEASURED` is fitted to one and two H200s by tools/bench/scaling.py; many_gpus.md beside it has each
row next to this arithmetic. Nothing over two GPUs was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..kernels.limits import cdiv
from .hosting import Pace

NODE = 8
"""GPUs of a machine where nobody says."""

GATHERED = 4
"""Ranks up to which expert parallelism gathers tokens, as `distributed.expert_parallel` chooses."""

NVLINK_HOP, NETWORK_HOP = 3e-6, 10e-6
"""Seconds of one hop of a ring: assumed."""

_BACKWARD = 2 / 3  # of compute: forward, forward again and the gradients of activations are alike
_CARD, _SLOW_CARD = 45e9, 11.25e9  # Nine tenths of 400 and 100 Gb/s: assumed


@dataclass(frozen=True, slots=True)
class Work:
    """What one model's step computes and moves."""

    layers: int
    expert_layers: int
    expert_flops: float  # For one token, forward, recomputed forward and backward
    other_flops: float
    layer_bytes: float  # Of all layers, packed, with adapters
    root_bytes: float  # Of everything else
    expert_gradients: float  # Bytes of the gradients of LoRA on experts
    other_gradients: float
    token_bytes: int  # Of one hidden state
    top_k: int
    trips: int = 6  # of a token to experts and back: 2 in each forward, and in backward

    @property
    def gradients(self) -> float:
        """Bytes of all gradients."""
        return self.expert_gradients + self.other_gradients


@dataclass(frozen=True, slots=True)
class Speed:
    """How quick one GPU and its host are."""

    host: float  # Seconds a layer, however few tokens
    experts: float  # FLOPs a second of experts
    others: float  # The same of attention, shared experts and the head
    engine: Mapping[str, float]  # Seconds a layer that an engine costs beyond its communication

    def on(self, pace: Pace) -> Speed:
        """Return an estimate for another card, by its nominal TFLOPS."""
        times = pace.against_measured
        return replace(self, experts=self.experts * times, others=self.others * times)


MEASURED = Speed(
    host=2.62e-3,
    experts=173e12,
    others=649e12,
    engine={"ddp": 0.54e-3, "fsdp": 0.40e-3, "ep": 1.44e-3, "all-to-all": 13.5e-3},
)
"""Of H200s, without CUDA graphs; expert parallelism by transformers' all-to-all is apart."""


@dataclass(frozen=True, slots=True)
class Links:
    """What connects GPUs."""

    bus: float  # Bytes a second that a GPU moves in a collective within a node
    network: float  # Between nodes, by each GPU's own network card
    node: int = NODE  # GPUs

    @classmethod
    def of(cls, pace: Pace, node: int = NODE) -> Links:
        """Return those of a card; beside NVLink each has 400 Gb/s between nodes, else 100."""
        return cls(pace.bus, _CARD if pace.bus > pace.link else _SLOW_CARD, node)

    def nodes(self, ranks: int, gpus: int) -> int:
        """Return over how many nodes a group of ranks is spread at most, of GPUs in their order."""
        if gpus <= self.node or self.node % ranks == 0:
            return 1
        return max(2, cdiv(ranks, self.node))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train on some GPUs."""

    engine: str  # "single", "ddp", "fsdp" or "ep"
    gpus: int
    group: int  # Ranks that hold one model together
    gathers: bool = True  # Whether expert parallelism may gather tokens

    @property
    def copies(self) -> int:
        """Number of groups."""
        return self.gpus // self.group

    @property
    def cost(self) -> str:
        """The key of `Speed.engine`."""
        gathered = self.gathers and self.group <= GATHERED
        return "all-to-all" if self.engine == "ep" and not gathered else self.engine


def compute(work: Work, tokens: int, speed: Speed) -> float:
    """Return the seconds that one GPU computes for so many tokens."""
    each = work.expert_flops / speed.experts + work.other_flops / speed.others
    return work.layers * speed.host + tokens * each


def ring(nbytes: float, ranks: int, nodes: int, links: Links) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all.

    The ranks are spread over the nodes; there are as many rings as a node has of them, and each has
    a network card.
    """
    if ranks < 2 or not nbytes:
        return 0.0
    wire = links.bus if nodes == 1 else min(links.bus, links.network * ranks / nodes)
    hops = (ranks - nodes) * NVLINK_HOP + (nodes if nodes > 1 else 0) * NETWORK_HOP
    return nbytes * (ranks - 1) / ranks / wire + hops


def all_to_all(nbytes: float, ranks: int, links: Links) -> float:
    """Return the seconds in which each rank sends so many bytes to all, itself included."""
    near = min(ranks, links.node)
    far = min(links.network, links.bus)
    return nbytes * ((near - 1) / ranks / links.bus + (ranks - near) / ranks / far)


def trip_bytes(work: Work, way: Way, tokens: int) -> int:
    """Return the bytes of one trip of all tokens, of a rank or (gathered) of its group."""
    gathered = way.cost == "ep"
    return tokens * work.token_bytes * (way.group if gathered else work.top_k)


def exposed(work: Work, way: Way, tokens: int, busy: float, links: Links) -> float:
    """Return the seconds of communication that `busy` seconds of compute do not hide."""
    backward, nodes = _BACKWARD * busy, links.nodes(way.group, way.gpus)
    every = links.nodes(way.gpus, way.gpus)

    def summed(own: float, whole: float) -> float:  # over copies of a share, and over all ranks
        seconds = 2 * ring(own / way.group, way.copies, min(way.copies, every), links)
        return max(0.0, seconds + 2 * ring(whole, way.gpus, every, links) - backward)

    if way.engine == "ddp":
        return summed(0.0, work.gradients)
    if way.engine == "fsdp":
        gathers, scatters = (
            work.layers * ring(nbytes / work.layers, way.group, nodes, links)
            for nbytes in (work.layer_bytes, work.gradients)
        )
        root = ring(work.root_bytes, way.group, nodes, links)
        return root + 2 * gathers + scatters + summed(work.gradients, 0.0)
    if way.engine == "ep":
        nbytes = trip_bytes(work, way, tokens)
        if way.cost == "ep":
            trip = ring(nbytes, way.group, nodes, links)
        else:
            trip = all_to_all(nbytes, way.group, links)
        sums = summed(work.expert_gradients, work.other_gradients)
        return work.trips * work.expert_layers * trip + sums
    return 0.0


def step_seconds(work: Work, way: Way, tokens: int, speed: Speed, links: Links) -> float:
    """Return the seconds of a step in which each rank has so many tokens."""
    busy = compute(work, tokens, speed) + work.layers * speed.engine.get(way.cost, 0.0)
    return busy + exposed(work, way, tokens, busy, links)
