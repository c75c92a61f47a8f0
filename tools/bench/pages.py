"""What the scripts that write pages share: rows of results/*.csv, tables, and blocks of README.md.

A page says nothing that its data does not: a figure is looked up by what was run, and a look-up
that finds nothing, or two runs, is an error.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path

from common import RESULTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "moe_qlora/docs"
README = ROOT / "README.md"
GB = 1e9


@dataclass(frozen=True)
class Run:
    """What one benchmark measured in one setting."""

    file: str
    where: dict[str, str]  # Date, commit, gpu, versions and setting
    p20: dict[str, float] = field(default_factory=dict)
    p50: dict[str, float] = field(default_factory=dict)  # By metric
    p80: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> str:
        """The most bytes in training, in GB."""
        return gigabytes(self.p50["peak in training"])

    @property
    def speed(self) -> str:
        """Tokens a second."""
        return whole(self.p50["throughput"])

    @property
    def spread(self) -> str:
        """The same of the slower and of the faster steps."""
        return f"{whole(self.p20['throughput'])} to {whole(self.p80['throughput'])}"


def gigabytes(nbytes: float) -> str:
    """Bytes in GB of 10^9, as tables have them."""
    return f"{nbytes / GB:.1f} GB"


def whole(value: float) -> str:
    """A figure without decimals; a half is rounded down."""
    return f"{ceil(value - 0.5):,}"


def three_digits(value: float | None) -> str:
    """A figure with three significant digits, or a dash where there is none."""
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


@cache
def rows_of(file: str) -> tuple[dict[str, str], ...]:
    """The rows of a file of results."""
    with (RESULTS / file).open(newline="", encoding="utf-8") as lines:
        return tuple(csv.DictReader(lines))


def find(file: str, commit: str, name: str, words: str, without: Sequence[str] = ()) -> Run:
    """The one run of this commit and name whose setting has all of these words.

    Raises:
        LookupError: There is no such run, or more than one.
    """
    found: dict[str, Run] = {}
    for row in rows_of(file):
        setting = row["setting"].split()
        if (row["commit"], row["name"]) != (commit, name) or not {*words.split()} <= {*setting}:
            continue
        if any(word.split("=")[0] in without for word in setting):
            continue
        run = found.setdefault(f"{row['date']} {row['setting']}", Run(file, row))
        for part in ("p20", "p50", "p80"):
            figures, value = getattr(run, part), float(row[part])
            if figures.setdefault(row["metric"], value) != value:
                raise LookupError(f"{file}: {commit} {row['setting']} was run twice")
    if len(found) != 1:
        raise LookupError(f"{file}: {commit} {name} {words}: {[*found] or 'no run'}")
    return next(iter(found.values()))


def source(runs: Iterable[Run], note: str = "") -> str:
    """The line below a table: of which rows it is; all of one commit, or an error."""
    runs = list(runs)
    commits = sorted({(run.file, run.where["commit"], run.where["gpu"]) for run in runs})
    if len(commits) != 1:
        raise LookupError(f"a table of several runs: {commits}")
    ((file, commit, gpu),) = commits
    dates = " and ".join(sorted({run.where["date"] for run in runs}))
    link = f"[{file}](../../tools/bench/results/{file})"
    return f"Rows: {link}, commit {commit}, {dates}, one {gpu}{note}."


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, space: str = " ") -> str:
    """A table in Markdown, with `space` around each cell."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{space}{cell}{space}" for cell in line] for line in lines)
    return "\n".join(f"|{'|'.join(line)}|" for line in cells)


def bullets(text: str) -> str:
    """A list, whose lines are filled anew."""
    items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    return "\n".join(_fill("- " + " ".join(item.split()), "  ") for item in items)


def _fill(text: str, indent: str = "") -> str:
    """One paragraph in lines of 100 characters."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def page(*parts: str) -> str:
    """A page, or a block of one, of paragraphs and tables."""
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(part: str) -> str:
    """A paragraph in lines of 100 characters; tables, lists and code as they are."""
    if "\n" in part.strip() or part[0] in "|# ":
        return part.strip("\n")
    return _fill(part)


def filled(text: str, name: str, block: str) -> str:
    """A document with what is between `<!-- NAME: begin -->` and its end replaced.

    Raises:
        LookupError: The document has no such marks, or has them twice.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise LookupError(f"no place for {name}: give one line {begin} and, below, one {end}")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{block.strip()}\n\n{end}", text)


def write(file: Path, text: str) -> None:
    """Write a page, and say so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file.relative_to(ROOT)}")


def fill_readme(name: str, block: str) -> None:
    """Write a block of README.md."""
    write(README, filled(README.read_text(encoding="utf-8"), name, block))
