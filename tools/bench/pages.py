"""Markdown of generated pages: paragraphs, tables, and blocks of README.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "moe_qlora/docs"
README = ROOT / "README.md"
GB = 1e9


def gigabytes(nbytes: float) -> str:
    """Bytes in GB of 10^9, as tables have them."""
    return f"{nbytes / GB:.1f} GB"


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
