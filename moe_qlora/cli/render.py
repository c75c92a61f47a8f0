"""What every subcommand prints with: a console, tables that fit it, prose, a spinner.

`console` is as wide as the terminal, or as COLUMNS says; into a pipe without either 160 columns.
A `FittedTable` is told what its columns may suffer: names lose their middle, sentences are wrapped
at spaces, and columns that matter least are left out, which a line under the table says.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..errors import visible
from ..progress import VisibleConsole

_PIPE_SIZE = (160, 24)
_SHORTEST_NAME = 26  # columns, of one whose middle is left out
_SHORTEST_PROSE = 16  # columns, of a cell that is wrapped
_GAP = 2  # columns between two of a table
_LINES = box.Box("    \n    \n \u2500\u2500 \n    \n \u2500\u2500 \n    \n    \n    \n")
"""Lines under headings and sections, and none elsewhere."""


def console(color: str) -> Console:
    """Return a console on stdout, plain in a pipe unless colour is asked for."""
    return VisibleConsole(
        width=max(shutil.get_terminal_size(_PIPE_SIZE).columns, 20),
        force_terminal={"always": True, "never": False, "auto": None}[color],
        no_color=color == "never",
        highlight=False,
    )


def say(out: Console, sentence: str, style: str = "", indent: int = 0) -> None:
    """Print a sentence, in rich's markup, wrapped at spaces: a long name or path stays whole.

    `indent` is of the second line and those after it.
    """
    text = out.render_str(sentence, style=style)
    cuts, start, room = [], 0, out.width
    for word in list(re.finditer(r"\S+", text.plain))[1:]:
        if cell_len(text.plain[start : word.end()]) > room:
            start, room = word.start(), out.width - indent
            cuts.append(start)
    for number, line in enumerate(text.divide(cuts)):
        line.rstrip()
        out.print(line if number == 0 else Text(" " * indent) + line, soft_wrap=True)


def print_json(content: object) -> None:
    """Print a document on stdout."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


@contextmanager
def working(doing: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner on stderr while this lasts, where that is a terminal and nobody asked not to.

    Wrap whatever may take over two seconds and has no bar of its own, imports of torch included.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    with VisibleConsole(stderr=True).status(escape(visible(doing))):
        yield


@dataclass(frozen=True)
class Column:
    """A column of a `FittedTable`.

    Attributes:
        heading: What stands over it.
        kind: "name" for what loses its middle where it is too long, "prose" for what is wrapped at
            spaces, "number" for what stands to the right, "word" for what is left as it is.
        rank: How early it is left out: 0 never, else the highest first.
    """

    heading: str
    kind: str = "word"
    rank: int = 0


@dataclass
class FittedTable:
    """A table that fits the console it is printed on; cells are rich's markup.

    `instead` is what else shows the columns that were left out, for the line that says so.
    """

    title: str
    columns: Sequence[Column]
    instead: str = "--json"
    rows: list[tuple[str, ...] | None] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def add_section(self) -> None:
        """Draw a line under the last row."""
        self.rows.append(None)

    def show(self, out: Console) -> None:
        """Print the table, with its title over it and what has no room named under it."""
        shown = self._fitted(out.width)
        widths = self._widths(shown, out.width)
        mark = "..." if out.options.ascii_only else "\u2026"
        table = Table(box=_LINES, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index in shown:
            column = self.columns[index]
            table.add_column(
                column.heading,
                justify="right" if column.kind == "number" else "left",
                width=widths[index],
                no_wrap=column.kind != "prose",
            )
        for row in self.rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*(self._cell(row[i], i, widths[i], mark) for i in shown))
        say(out, self.title, "bold")
        out.print(table)
        hidden = [c.heading for i, c in enumerate(self.columns) if i not in shown and c.heading]
        if hidden:
            more = f"(no room for: {', '.join(hidden)}; a wider terminal or {self.instead} has it)"
            say(out, escape(more), "dim")
        out.line()

    def _fitted(self, width: int) -> list[int]:
        """Return the columns that are shown in a console of so many characters."""
        shown = list(range(len(self.columns)))
        while sum(self._least(i) for i in shown) + _GAP * (len(shown) - 1) > width:
            ranked = [i for i in shown if self.columns[i].rank]
            if not ranked:
                break
            shown.remove(max(ranked, key=lambda i: self.columns[i].rank))
        return shown

    def _natural(self, index: int) -> int:
        cells = [row[index] for row in self.rows if row is not None]
        return max(
            Text.from_markup(text).cell_len for text in (self.columns[index].heading, *cells)
        )

    def _least(self, index: int) -> int:
        kind, natural = self.columns[index].kind, self._natural(index)
        if kind == "name":
            return min(natural, _SHORTEST_NAME)
        if kind == "prose":
            cells = [row[index] for row in self.rows if row is not None]
            words = " ".join(Text.from_markup(text).plain for text in cells).split()
            return min(natural, max(_SHORTEST_PROSE, *map(cell_len, words)))
        return natural

    def _widths(self, shown: list[int], width: int) -> dict[int, int]:
        """Return each shown column's width: what is over goes to names, then to prose."""
        widths = {i: self._least(i) for i in shown}
        spare = width - sum(widths.values()) - _GAP * (len(shown) - 1)
        for kind in ("name", "prose"):
            for index in (i for i in shown if self.columns[i].kind == kind):
                more = max(min(spare, self._natural(index) - widths[index]), 0)
                widths[index] += more
                spare -= more
        return widths

    def _cell(self, markup: str, index: int, width: int, mark: str) -> Text:
        text = Text.from_markup(markup)
        if self.columns[index].kind != "name" or text.cell_len <= width:
            return text
        return Text(elided(text.plain, width, mark))


def elided(name: str, width: int, mark: str = "\u2026") -> str:
    """Return a name without its middle, so that it takes at most `width` columns; its end stays."""
    if cell_len(name) <= width:
        return name
    room = max(width - cell_len(mark), 2)
    # A wide character that would be cut is left out.
    head = set_cell_size(name, room * 2 // 5).rstrip()
    tail = set_cell_size(name[::-1], room - cell_len(head))[::-1].lstrip()
    return head + mark + tail
