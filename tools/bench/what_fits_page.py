"""The tables of memory.md, README.md and the benches' README.md, from planned/what_fits.csv.

The prose is in the pages; each table stands between `<!-- NAME: begin -->` and its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

from what_fits import (
    DEFAULTS,
    GPUS,
    MODELS,
    SETTINGS,
    Cell,
    described,
    options_of,
    read,
    read_checks,
)

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "moe_qlora/docs/memory.md"
BENCHES = ROOT / "tools/bench/README.md"
NAMES = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "glm-4.5-air": "GLM-4.5-Air",
    "deepseek-v3": "DeepSeek-V3",
}
CARDS = {"24 GB": "RTX 4090", "48 GB": "A6000", "80 GB": "H100", "141 GB": "H200"}
README_SEQ = 4096
PAGE_SEQS = (4096, 32768)
GIB = 1 << 30


def blocks() -> dict[Path, dict[str, str]]:
    """Return what stands between the marks of each page, by their names."""
    cells = {(cell.model, cell.gpus, cell.seq): cell for cell in read()}
    of_page = {"settings": settings(), "cells": whole_table(cells)}
    in_readme = {"what-fits": brief_table(cells)}
    return {PAGE: of_page, BENCHES: {"measured": measured()}, README: in_readme}


def settings() -> str:
    """Return when and with which versions the cells were planned, and the legend."""
    where, rows = described(), []
    packages = ", ".join(f"{name} {version}" for name, version in [*where.items()][2:])
    planned = f"Planned on {where['date']} at commit {where['commit']} with {packages}:"
    for letter, given in SETTINGS.items():
        have = {**DEFAULTS, **given}
        kept = "computed again" if have["checkpointing"] else "kept"
        lora = (have["targets"].replace(",", " and "), have["rank"], have["adapter_dtype"])
        place = "host" if have["offload"] else "GPU"
        rows.append((letter, *lora, have["optimizer"], kept, place, f"`{options_of(letter)}`"))
    header = ("", "LoRA on", "rank", "adapters", "optimizer", "activations", "experts in")
    return f"{planned}\n\n{table((*header, 'options of `moe-qlora plan`'), rows)}"


def whole_table(cells: Mapping[tuple[str, str, int], Cell]) -> str:
    """Return the table of all models for two lengths, with the command of one of its cells."""
    rows = [
        (NAMES[model], f"{seq:,}", *(shown(cells[model, gpus, seq]) for gpus in GPUS.values()))
        for model, seq in product(MODELS, PAGE_SEQS)
    ]
    example = cells["qwen3-30b-a3b", GPUS["24 GB"], README_SEQ]
    command = f"The command of Qwen3-30B-A3B on 24 GB:\n\n    {example.command()}"
    return f"{table(('model', 'tokens', *GPUS), rows)}\n\n{command}"


def shown(cell: Cell) -> str:
    """Return a letter, GiB and an engine, or what is needed."""
    if not cell.fits:
        return f"needs {cell.least}"
    where = {"": "", "ddp": " DDP", "fsdp": " FSDP2"}[cell.engine]
    where = f", host {cell.host / GIB:.0f}" if cell.host else where
    return f"**{cell.setting}** {cell.needed / GIB:.1f}{where}"


def measured() -> str:
    """Return how near plans come to what GPUs measured."""
    rows, worst = [], 0.0
    for check in read_checks():
        error = 100 * (check.planned / check.measured - 1)
        worst = max(worst, abs(error))
        run = f"[{check.file}](results/{check.file}), {check.commit}"
        peaks = (f"{peak / 1e9:.1f} GB" for peak in (check.planned, check.measured))
        rows.append((NAMES[check.what], f"`{check.setting}`", run, *peaks, f"{error:+.1f} %"))
    header = ("model", "setting", "rows, commit", "planned", "measured", "error")
    return f"The largest error is {worst:.1f} %:\n\n{table(header, rows)}"


def brief_table(cells: Mapping[tuple[str, str, int], Cell]) -> str:
    """Return the table of README.md: GiB on one card, without settings."""
    rows = [
        (NAMES[model], *(brief(cells[model, GPUS[size], README_SEQ]) for size in CARDS))
        for model in MODELS
    ]
    return table(("model", *(f"{card}, {size}" for size, card in CARDS.items())), rows, space="")


def brief(cell: Cell) -> str:
    """Return a cell without its setting."""
    if not cell.fits:
        return "no"
    alone = "" if "experts" in SETTINGS[cell.setting]["targets"] else "*"
    host = f" +{cell.host / GIB:.0f}" if cell.host else ""
    return f"{cell.needed / GIB:.1f}{alone}{host}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, space: str = " ") -> str:
    """Return a table in Markdown, with `space` around each cell."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{space}{cell}{space}" for cell in line] for line in lines)
    return "\n".join(f"|{'|'.join(line)}|" for line in cells)


def filled(page: Path) -> str:
    """Return a page with its tables written anew.

    Raises:
        LookupError: The page has no marks for a table, or has them twice.
    """
    text = page.read_text(encoding="utf-8")
    for name, block in blocks()[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise LookupError(f"no place for {name}: give one line {begin} and, below, one {end}")
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text = pattern.sub(f"{begin}\n\n{block}\n\n{end}".replace("\\", r"\\"), text)
    return text


def main() -> None:
    """Write the tables of all pages."""
    for page in (PAGE, BENCHES, README):
        page.write_text(filled(page), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
