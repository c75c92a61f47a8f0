"""What the study runs, in the order of importance: a cut-off leaves whole blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

CODECS = ("bf16", "int8", "nf4", "nf4-dq", "fp4", "mxfp4")
SEEDS = (0, 1, 2)
RATES = (0.5, 2.0, 0.25, 4.0)
"""Other learning rates, as factors of the main one."""


@dataclass(frozen=True)
class Job:
    """One fine-tuning run, the training of a base, or the measurement of errors by expert.

    Attributes:
        kind: "base", "warm" (a run of two steps that fills caches), "tune" or "errors".
        block: The question that it answers.
        seed: Of the base model, of LoRA's start and of the order of batches.
        codec: How the experts are stored; attention stays bf16, but for "nf4+attention".
        targets: "experts", "attention" or "both".
        rank: r of LoRA; alpha is 2 r.
        experts: Which experts of a layer have LoRA: "all"; "hot-25" and "hot-50", the most used
            on the data; "cold-25", the least used; "random-25"; or "by use", r / 2 on all and 2 r
            more on the quarter that is used most, as many weights as r on all.
        rate: The learning rate, as a factor of the main one.
        length: Steps, as a factor of the main number.
    """

    kind: str
    block: str
    seed: int
    codec: str = "nf4"
    targets: str = "both"
    rank: int = 16
    experts: str = "all"
    rate: float = 1.0
    length: float = 1.0

    @property
    def key(self) -> str:
        """A name for files."""
        return "_".join(str(value).replace(" ", "-") for value in asdict(self).values())


def jobs() -> list[Job]:
    """Return all jobs, the most important first."""
    distinct: dict[Job, Job] = {}
    for job in _blocks():
        distinct.setdefault(replace(job, block=""), job)
    return list(distinct.values())


def _blocks() -> Iterator[Job]:
    for seed in SEEDS:
        yield Job("base", "base", seed, codec="bf16")
    for codec in ("nf4", "mxfp4", "int8", "bf16", "fp4", "nf4-dq"):
        yield Job("warm", "warm", -1, codec)
    for rank, experts in ((32, "all"), (64, "all"), (16, "by use")):
        yield Job("warm", "warm", -1, rank=rank, experts=experts)
    yield from _each("codecs", codec=CODECS)
    for seed in SEEDS:
        yield Job("errors", "errors", seed)
    two, others, ranks = ("nf4", "bf16"), ("mxfp4", "fp4", "int8", "nf4-dq"), (4, 64, 8, 32)
    yield from _each("targets", targets=("experts", "attention"), codec=two)
    yield from _each("ranks", rank=ranks)
    chosen = ("hot-25", "random-25", "by use", "cold-25", "hot-50")
    yield from _each("chosen", targets=("experts",), experts=chosen)
    yield from _each("chosen", experts=("hot-25",))
    for rate in RATES:
        yield from _each("rates", codec=two, rate=(rate,))
    yield from _each("codecs", codec=("nf4+attention",))
    yield from _each("ranks", codec=("bf16",), rank=ranks)
    yield from _each("targets", codec=others, targets=("experts", "attention"))
    for rate in RATES:
        yield from _each("rates", codec=others, rate=(rate,))
    yield from _each("length", codec=two, length=(4.0,))


def _each(block: str, **choices: Sequence[Any]) -> Iterator[Job]:
    """Yield a run of each combination for the first seed, then for the others."""
    for seed in SEEDS:
        for values in product(*choices.values()):
            yield Job("tune", block, seed, **dict(zip(choices, values, strict=True)))
