"""Output of the command line: tables, sentences, JSON, a spinner, and messages on stderr.

`console` is as wide as the terminal, or as COLUMNS says; into a pipe without either 160 columns.
Messages are one line each:

    error: ...          a `MoeQloraError`, or arguments that the program does not have
    warning: ...        a warning, or a log record of WARNING, of this package
    interrupted: ...    Ctrl-C

Of other libraries log records of ERROR alone are shown, and under `python -W default` warnings.
"""

import json
import logging
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import progress
from ..errors import one_line, visible
from ..layout import name_pattern

_PIPE_SIZE = (160, 24)
_LINES = box.Box("    \n    \n \u2500\u2500 \n    \n \u2500\u2500 \n    \n    \n    \n")
_COLORS = {"problem": "red", "warning": "yellow", "note": "yellow"}
_PACKAGE = __name__.partition(".")[0]


def console(color: str) -> Console:
    """Return a console on stdout, plain in a pipe unless colour is asked for."""
    return progress.console(
        width=max(shutil.get_terminal_size(_PIPE_SIZE).columns, 20),
        force_terminal={"always": True, "never": False, "auto": None}[color],
        no_color=color == "never",
        highlight=False,
    )


def print_json(content: object) -> None:
    """Print a document on stdout."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Show a spinner on stderr during the block, if that is a terminal."""
    console = progress.console(stderr=True)
    with console.status(escape(visible(doing))) if sys.stderr.isatty() else nullcontext():
        yield


def say(out: Console, text: str, style: str = "") -> None:
    """Print a paragraph; the words before its first colon in `style`, or in their kind's colour."""
    head, colon, rest = visible(text).partition(":")
    out.print(Text.assemble((head, _COLORS.get(head, style)), colon + rest))


def show_table(
    out: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str] | None]
) -> None:
    """Print a table that fits any width: cells are wrapped, and nothing is cut off.

    Args:
        out: The console.
        title: Printed in bold over the table.
        headings: Of the columns; `>` before one aligns numbers to the right, on one line each.
        rows: Cells; None draws a line.
    """
    table = Table(box=_LINES, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        right = heading.startswith(">")
        justify: Any = "right" if right else "left"
        table.add_column(heading.strip(">"), justify=justify, overflow="fold", no_wrap=right)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(visible(cell)) for cell in row))
    out.print(Text(visible(title)), style="bold")
    out.print(table)
    out.line()


def patterns(names: Iterable[str]) -> str:
    """Return the names with `*` for numbers, and their counts."""
    counts = Counter(name_pattern(name) for name in names)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "none"


@contextmanager
def streams() -> Iterator[None]:
    """Filter both streams, warnings and log records during the block.

    Output to a stream that was closed at the start is discarded.
    """
    root, handler = logging.getLogger(), _OneLine()
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(_Filtered(sys.stdout or nowhere)),
        redirect_stderr(_Filtered(sys.stderr or nowhere)),
        warnings.catch_warnings(),
    ):
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module=rf"{_PACKAGE}\b")
            warnings.showwarning = _show_warning
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


class _Filtered:
    """A text stream that escapes control characters, but for the first carriage return of a bar."""

    def __init__(self, stream: Any) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        head = text[: text.startswith("\r")]
        self.unfiltered.write(head + visible(text[len(head) :], keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


class _OneLine(logging.Handler):
    """Writes log records of this package from WARNING on, of others from ERROR on."""

    def emit(self, record: logging.LogRecord) -> None:
        own = record.name.partition(".")[0] == _PACKAGE
        if record.levelno >= (logging.WARNING if own else logging.ERROR):
            kind = "warning" if record.levelno < logging.ERROR else "error"
            source = "" if own else f" ({record.name})"
            sys.stderr.write(one_line(f"{kind}{source}", record.getMessage()))


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(one_line("warning", message))
