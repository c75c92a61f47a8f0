"""Plans ten models on six sets of GPUs; planned/what_fits.csv, and tables of memory.md and README.

    python tools/bench/what_fits.py                          every cell, an hour on one core
    python tools/bench/what_fits.py --models mixtral-8x7b    these models' cells anew
    python tools/bench/what_fits.py --models                 the tables alone, from the data

A cell is a model, a set of GPUs and a length of sequence, micro-batch 1. It holds the best setting
that `moe_qlora.plan` finds, or the memory that the smallest setting needs. Setting A is B in which
all layers keep their activations, as `plan` says of `fit_memory`.
"""

import argparse
import csv
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from common import head, today

import moe_qlora

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tools/bench/planned/what_fits.csv"
README, PAGE = ROOT / "README.md", ROOT / "moe_qlora/docs/memory.md"
GIB = 1 << 30
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
MODELS = {  # names that `plan` knows, and what the pages call them
    "gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b", "olmoe-1b-7b": "OLMoE-1B-7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite", "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B", "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "mixtral-8x7b": "Mixtral-8x7B", "glm-4.5-air": "GLM-4.5-Air", "deepseek-v3": "DeepSeek-V3",
}  # fmt: skip
GPUS = {  # by what the page calls them
    "24 GB": "RTX4090", "48 GB": "A6000", "80 GB": "H100", "141 GB": "H200",
    "2 x 141 GB": "2xH200", "8 x 141 GB": "8xH200",
}  # fmt: skip
CARDS = {"24 GB": "RTX 4090", "48 GB": "A6000", "80 GB": "H100", "141 GB": "H200"}
SEQS, PAGE_SEQS, README_SEQ = (2048, 4096, 8192, 32768), (4096, 32768), 4096
FIELDS = ("targets", "rank", "adapter_dtype", "optimizer", "offload")
_BOTH, _SMALL = "attention,experts", ("bfloat16", "adamw_8bit")
SETTINGS: dict[str, tuple[Any, ...]] = {  # in the order in which `plan` tries them; E: its defaults
    "A": (_BOTH, 16, "float32", "adamw", False),
    "B": (_BOTH, 16, "float32", "adamw", False),
    "C": (_BOTH, 16, *_SMALL, False),
    "D": (_BOTH, 8, *_SMALL, False),
    "E": ("attention", 16, "float32", "adamw", False),
    "F": ("attention", 8, *_SMALL, False),
    "G": (_BOTH, 8, *_SMALL, True),
    "H": ("attention", 8, *_SMALL, True),
}


class Cell(NamedTuple):
    """One cell, as a row of the data has it behind date, commit and versions."""

    model: str
    gpus: str
    seq: int
    setting: str  # A key of `SETTINGS`
    engine: str  # "ddp" or "fsdp"; "" on one GPU
    needed: int  # Bytes on the fullest GPU at its peak, with CUDA's context and gaps
    least: int  # GiB that each GPU must have; 0 where it fits
    host: int  # Bytes of packed experts in host memory


Row = tuple[Cell, tuple[str, ...]]  # With its date, commit and versions


def planned(model: str, gpus: str, seq: int) -> Cell:
    """Return the best setting that fits, else the memory that the smallest needs."""
    several = gpus[0] if gpus[1] == "x" else ""
    best = moe_qlora.plan(model, gpus=gpus, seq_len=seq).as_dict()["best"]
    settings = best["settings"] if best else {}
    given: dict[str, Any] = {name: settings.get(name) for name in ("prepared", "attention")}
    if best is None or settings.get("seq", 4096) != seq:  # It fits, if at all, a shorter one
        lora = {"targets": "attention", "rank": 8, "dtype": "bfloat16"}
        given |= {"prepared": True, "offload": not several, "optimizer": "adamw_8bit"}
        engine = f"fsdp:{several}" if several else None
        report = moe_qlora.plan(model, seq_len=seq, lora=lora, engine=engine, **given)
        needed = max(report.peak.nbytes, report.load_peak) + report.reserve
        host = report.as_dict().get("offload", {}).get("host", 0)
        found = ("F", "fsdp") if several else ("H", "")
        return Cell(model, gpus, seq, *found, needed, -(-needed // GIB), host)
    defaults = zip(FIELDS, SETTINGS["E"], strict=True)
    fields = tuple(settings.get(name, default) for name, default in defaults)
    letter = {value: key for key, value in SETTINGS.items()}[fields]
    engine = next((name for name in ("ddp", "fsdp") if name in settings), "")
    for name in (("ddp", "fsdp") if several else (None,)) if letter == "B" else ():
        sizes: dict[str, Any] = {"gpus": gpus, "seq_len": seq, "engine": name}
        report = moe_qlora.plan(model, lora=_BOTH, **sizes, **given)
        fit = report.fit if report.fits else None
        if fit is not None and fit.counts["keep"] == sum(fit.counts.values()):
            return Cell(model, gpus, seq, "A", name or "", fit.needed, 0, 0)
    return Cell(model, gpus, seq, letter, engine, best["needed"], 0, best["host"])


def read() -> dict[tuple[str, str, int], Row]:
    """Return the rows of the data by model, GPUs and length."""
    found = {}
    with DATA.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            *where, model, gpus, seq, setting, engine, needed, least, host = row.values()
            cell = Cell(model, gpus, int(seq), setting, engine, int(needed), int(least), int(host))
            found[cell[:3]] = cell, tuple(where)
    return found


def settings_table(rows: Iterable[Row]) -> str:
    """Return when and with which versions the cells were planned, and the legend."""
    every = zip(*(where for _, where in rows), strict=True)
    date, commit, *versions = (" and ".join(sorted({*values})) for values in every)
    packages = ", ".join(f"{name} {found}" for name, found in zip(PACKAGES, versions, strict=True))
    lines = []
    for letter, (targets, rank, dtype, optimizer, offload) in SETTINGS.items():
        options = f"--targets {targets}"
        if dtype != "float32":
            options += f" --adapter-dtype {dtype} --optimizer {optimizer}"
        options += f" --rank {rank}" * (rank != 16) + " --offload" * offload
        kept = "kept" if letter == "A" else "computed again"
        words = (targets.replace(",", " and "), rank, dtype, optimizer, kept)
        lines.append((letter, *words, "host" if offload else "GPU", f"`{options}`"))
    header = ("", "LoRA on", "rank", "adapters", "optimizer", "activations", "experts in")
    legend = table((*header, "options of `moe-qlora plan`"), lines)
    return f"Planned on {date} at commit {commit} with {packages}:\n\n{legend}"


def shown(cell: Cell, brief: bool = False) -> str:
    """Return a letter, GiB and an engine, or what is needed; in brief for README."""
    size, host = f"{cell.needed / GIB:.1f}", f"{cell.host / GIB:.0f}"
    if brief:
        alone = "" if "experts" in SETTINGS[cell.setting][0] else "*"
        return "no" if cell.least else f"{size}{alone}" + f" +{host}" * bool(cell.host)
    where = {"": "", "ddp": " DDP", "fsdp": " FSDP2"}[cell.engine]
    where = f", host {host}" if cell.host else where
    return f"needs {cell.least}" if cell.least else f"**{cell.setting}** {size}{where}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], space: str = " ") -> str:
    """Return a table in Markdown, with `space` around each cell."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{space}{cell}{space}" for cell in line] for line in lines)
    return "\n".join(f"|{'|'.join(line)}|" for line in cells)


def filled(page: Path) -> str:
    """Return a page with what stands between its `<!-- NAME: begin -->` marks written anew."""
    rows, text, lines = read(), page.read_text(encoding="utf-8"), list[Sequence[str]]()
    brief, sizes = page == README, CARDS if page == README else GPUS
    for (model, title), seq in product(MODELS.items(), [README_SEQ] if brief else PAGE_SEQS):
        cells = [shown(rows[model, GPUS[size], seq][0], brief) for size in sizes]
        lines.append((title, *([] if brief else [f"{seq:,}"]), *cells))
    if brief:
        cards = (f"{card}, {size}" for size, card in CARDS.items())
        blocks = {"what-fits": table(("model", *cards), lines, space="")}
    else:
        blocks = {"cells": table(("model", "tokens", *GPUS), lines)}
        blocks["settings"] = settings_table(rows.values())
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name}: begin -->")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        if not end:
            raise LookupError(f"{page} has no place for {name}")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    return text


def main() -> None:
    """Plan the models that the command line asks for, and write data and pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    for model in parser.parse_args().models:
        where, start = (today(), head(), *map(version, PACKAGES)), time.process_time()
        cells = [planned(model, gpus, seq) for seq, gpus in product(SEQS, GPUS.values())]
        print(f"{model}: {time.process_time() - start:.0f} s", flush=True)
        rows = read() | {cell[:3]: (cell, where) for cell in cells}
        keys = [(m, g, s) for m, s, g in product(MODELS, SEQS, GPUS.values())]
        with DATA.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("date", "commit", *PACKAGES, *Cell._fields))
            writer.writerows((*rows[key][1], *rows[key][0]) for key in keys if key in rows)
    for page in (PAGE, README):
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
