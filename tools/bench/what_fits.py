"""Plans eight models on six sets of GPUs; planned/what_fits.csv and the tables of memory.md.

    python tools/bench/what_fits.py                     every cell, minutes on a CPU, then the pages
    python tools/bench/what_fits.py --models mixtral-8x7b    these models' cells anew
    python tools/bench/what_fits.py --write-only        tables of both pages, from the data

A cell is a model, a set of GPUs and a length of sequence, micro-batch 1. It holds the first setting
of `SETTINGS` that `moe_qlora.plan` says fits, under the first engine of `engines_of`; where none
does, the smallest memory that the last setting needs. Settings with packed experts in host memory
are for one GPU: several share the experts. Runs that GPUs measured are planned as well,
with today's plan, to show how near it comes; planned/what_fits_checked.csv has these.
`what_fits_page.py` writes the tables of the page and of README.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

from common import RESULTS, head

from moe_qlora.kernels.cards import PORTABLE, Card
from moe_qlora.planning.budget import Engine, Settings
from moe_qlora.planning.devices import devices_of
from moe_qlora.planning.model import ModelSource, source_of
from moe_qlora.planning.plan import RUNGS
from moe_qlora.planning.planner import Planner
from moe_qlora.planning.report import MemoryPlan

DATA = RESULTS.with_name("planned") / "what_fits.csv"
CHECKED = RESULTS.with_name("planned") / "what_fits_checked.csv"
ENVIRONMENT = ("date", "commit", "torch", "transformers", "peft", "bitsandbytes")
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"attention": "flex_attention", "prepared": True},
    "gpt-oss-120b": {"attention": "flex_attention", "prepared": True},
    "qwen3-30b-a3b": {"prepared": True},
    "qwen3-next-80b-a3b": {"prepared": True},
    "qwen3-235b-a22b": {"prepared": True},
    "mixtral-8x7b": {"prepared": True},
    "glm-4.5-air": {},
    "deepseek-v3": {"prepared": True},
}
"""Models by the names that `plan` knows, and what of each is the same in all cells.

Liger's loss is on where it knows the model. gpt-oss has flex attention, since its default computes
with all scores in memory.
"""

GPUS = {
    "24 GB": "RTX4090",
    "48 GB": "A6000",
    "80 GB": "H100",
    "141 GB": "H200",
    "2 x 141 GB": "2xH200",
    "8 x 141 GB": "8xH200",
}
"""Devices as `plan` takes them, by what the page calls them."""

SEQS = (2048, 4096, 8192, 32768)

SETTINGS: dict[str, dict[str, Any]] = {"A": {**RUNGS[0], "checkpointing": False}}
SETTINGS |= zip("BCDEFGH", RUNGS, strict=True)
"""Arguments of `plan` beside its defaults, the one to prefer first, and the smallest last."""

DEFAULTS: dict[str, Any] = {
    "rank": 16,
    "adapter_dtype": "float32",
    "optimizer": "adamw",
    "checkpointing": True,
    "offload": False,
}


class Cell(NamedTuple):
    """One cell, as a row of the data has it."""

    model: str
    gpus: str  # As `plan` takes them
    seq: int
    setting: str  # A key of `SETTINGS`
    engine: str  # "ddp" or "fsdp"; "" on one GPU
    fits: bool  # Whether it fits `gpus`
    peak: int  # Bytes of tensors on the fullest GPU at its peak
    needed: int  # The same with CUDA's context and gaps between blocks
    least: int  # Whole GiB that each GPU must have; 0 where it fits
    host: int  # Bytes of packed experts in host memory

    @property
    def devices(self) -> int:
        """How many GPUs there are."""
        return len(devices_of(self.gpus)[0])

    def arguments(self) -> dict[str, Any]:
        """The arguments of `moe_qlora.plan` that say the same."""
        engine = {self.engine: self.devices} if self.engine else {}
        return {
            "gpus": self.gpus if self.fits else _of_size(self.devices, self.least),
            **engine,
            "seq": self.seq,
            **MODELS[self.model],
            **SETTINGS[self.setting],
        }

    def command(self) -> str:
        """The command line that says the same."""
        options = [_option(name, value) for name, value in self.arguments().items()]
        return " ".join(["moe-qlora plan", self.model, *options])


def options_of(letter: str) -> str:
    """The options of `moe-qlora plan` that a setting stands for."""
    return " ".join(_option(name, value) for name, value in SETTINGS[letter].items())


def _option(name: str, value: Any) -> str:
    word = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return word if value else word.replace("--", "--no-", 1)
    return f"{word} {value}"


def _of_size(count: int, gibibytes: int) -> str:
    return f"{count}x{gibibytes}GiB" if count > 1 else f"{gibibytes}GiB"


def engines_of(devices: int) -> tuple[str, ...]:
    """The engines for so many GPUs, the faster first."""
    return ("",) if devices == 1 else ("ddp", "fsdp")


def letters_of(devices: int) -> list[str]:
    """The settings for so many GPUs."""
    return [s for s, given in SETTINGS.items() if devices == 1 or not given.get("offload")]


class Planned:
    """One model's planners. Cells share them, and the steps that they rehearse."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.planner = cache(self._planner)

    def cell(self, gpus: str, seq: int) -> Cell:
        """The first setting that fits, else the memory that the smallest needs."""
        devices, card, _ = devices_of(gpus)
        letters = letters_of(len(devices))
        for letter in letters:
            for engine in engines_of(len(devices)):
                if self.fits(letter, engine, seq, devices, card):
                    return self._cell(gpus, seq, letter, engine, 0)
        letter, engine = letters[-1], engines_of(len(devices))[-1]
        least = self.least(letter, engine, seq, devices)
        return self._cell(gpus, seq, letter, engine, least)

    def fits(
        self, letter: str, engine: str, seq: int, devices: Sequence[int], card: Card = PORTABLE
    ) -> bool:
        """Whether a step fits these devices, and the model while it loads."""
        return bool(self.report(letter, engine, seq, devices, card).fits)

    def report(
        self, letter: str, engine: str, seq: int, devices: Sequence[int], card: Card = PORTABLE
    ) -> MemoryPlan:
        """The plan of these devices, without a search."""
        planner = self.planner(letter, card)
        ranks = Engine(engine, len(devices)) if engine else None
        settings = replace(planner.settings, seq=seq, engine=ranks)
        return planner.with_settings(settings).report(devices)

    def least(self, letter: str, engine: str, seq: int, devices: Sequence[int]) -> int:
        """The whole GiB that each of as many devices must have."""
        size = self.report(letter, engine, seq, devices).fullest.needed >> 30
        # The workspace grows with the device, to a limit.
        while not self.fits(letter, engine, seq, [size << 30] * len(devices)):
            size += 1
        return size

    def _cell(self, gpus: str, seq: int, letter: str, engine: str, least: int) -> Cell:
        devices, card, _ = devices_of(gpus)
        if least:  # a size is the size of any card
            devices, card = (least << 30,) * len(devices), PORTABLE
        made = self.report(letter, engine, seq, devices, card)
        use, hosting = made.fullest, made.hosting
        peak = use.peak.nbytes if use.peak else 0
        host = 0 if hosting is None else hosting.host_nbytes(hosting.most)
        return Cell(self.model, gpus, seq, letter, engine, not least, peak, use.needed, least, host)

    def _planner(self, letter: str, card: Card) -> Planner:
        settings = Settings(**{**MODELS[self.model], **SETTINGS[letter]})
        return Planner(self.source, settings, card=card)

    @cached_property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return source_of(self.model, None)


class Check(NamedTuple):
    """A run that a GPU measured, and what plan says of it today."""

    what: str  # In words
    file: str  # Of tools/bench/results
    commit: str
    setting: str  # Of the row, shortened to what tells it from others
    measured: int  # Bytes at the peak in training
    planned: int


def checks() -> Iterator[Check]:
    """Plan the measured runs of the data anew."""
    for check in read_checks():
        words = {w: v for w, _, v in (word.partition("=") for word in check.setting.split())}
        how = {"attention": words["attention"]} if "attention" in words else {}
        engine = Engine("fsdp", int(words["gpus"])) if "fsdp2" in words else None
        liger = "liger" in words.get("with", "")
        batch, seq = int(words["batch"]), int(words["seq"])
        peak = _planned(check.what, batch, seq, engine, prepared=liger, **how)
        yield check._replace(planned=peak)


def _planned(model: str, batch: int, seq: int, engine: Engine | None, **options: Any) -> int:
    """The planned peak of a whole model of the benchmarks, whose Linear layers are not packed."""
    options |= {"engine": engine}
    settings = Settings(batch, seq, 16, "attention,experts", "bfloat16", **options)
    source = replace(source_of(model, None), linears=False)
    planner = Planner(source, settings, card=devices_of("H200")[1])  # which measured them
    return planner.report(()).peak.nbytes


def read() -> list[Cell]:
    """The cells of the data, in its order."""
    return [cell for cell, _ in _rows()]


def read_checks() -> list[Check]:
    """The runs that were planned anew."""
    with CHECKED.open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return [
        Check(what, run, commit, setting, int(measured), int(plan))
        for what, run, commit, setting, measured, plan in rows
    ]


def described() -> dict[str, str]:
    """When, and of which commits and versions, the data is."""
    rows = [where for _, where in _rows()]
    return {name: " and ".join(sorted({row[name] for row in rows})) for name in ENVIRONMENT}


def _rows() -> Iterator[tuple[Cell, dict[str, str]]]:
    with DATA.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            fields: dict[str, Any] = {name: row[name] for name in Cell._fields}
            fields |= {name: int(row[name]) for name in ("seq", "peak", "needed", "least", "host")}
            yield Cell(**{**fields, "fits": row["fits"] == "yes"}), row


def write(cells: Sequence[tuple[Cell, Mapping[str, str]]]) -> None:
    """Write the data."""
    with DATA.open("w", newline="", encoding="utf-8") as file:
        columns = [*ENVIRONMENT, *Cell._fields, "command"]
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for cell, where in cells:
            fits = "yes" if cell.fits else "no"
            writer.writerow({**where, **cell._asdict(), "fits": fits, "command": cell.command()})


def write_checks(rows: Sequence[Check]) -> None:
    """Write the runs that were planned anew."""
    with CHECKED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, Check._fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row._asdict() for row in rows)


def _environment() -> dict[str, str]:
    versions = {name: version(name) for name in ENVIRONMENT[2:]}
    return {"date": dt.datetime.now(dt.UTC).date().isoformat(), "commit": head(), **versions}


def main() -> None:
    """Plan what the command line asks for, and write data and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="names of MODELS by comma")
    parser.add_argument("--write-only", action="store_true", help="plan nothing")
    options = parser.parse_args()
    if not options.write_only:
        plan_cells([name for name in MODELS if name in options.models.split(",")])
        write_checks(list(checks()))
    import what_fits_page

    what_fits_page.main()


def plan_cells(models: Sequence[str]) -> None:
    """Plan the cells of these models, and write them among the others of the data."""
    known: dict[tuple[str, str, int], tuple[Cell, Mapping[str, str]]] = {}
    if DATA.exists():
        known = {(cell.model, cell.gpus, cell.seq): (cell, where) for cell, where in _rows()}
    for model in models:
        planned, where, start = Planned(model), _environment(), time.process_time()
        for seq in SEQS:
            for gpus in GPUS.values():
                known[model, gpus, seq] = planned.cell(gpus, seq), where
        print(f"{model}: {time.process_time() - start:.0f} s", flush=True)
        order = [(name, gpus, seq) for name in MODELS for seq in SEQS for gpus in GPUS.values()]
        write([known[key] for key in order if key in known])


if __name__ == "__main__":
    main()
