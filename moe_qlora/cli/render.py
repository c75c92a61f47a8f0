"""What every subcommand prints with: a console, and tables whose numbers stand to the right."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table

from ..progress import VisibleConsole

_PIPE_WIDTH = 160


def console(color: str) -> Console:
    """Return a console on stdout; into a pipe it is 160 columns wide and plain unless asked."""
    piped = not sys.stdout.isatty()
    return VisibleConsole(
        width=_PIPE_WIDTH if piped else shutil.get_terminal_size().columns,
        force_terminal={"always": True, "never": False, "auto": None}[color],
        no_color=color == "never",
        highlight=False,
    )


def print_json(content: object) -> None:
    """Print a document on stdout."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def table(title: str, headings: Iterable[str], right: Collection[str]) -> Table:
    """Return an empty table; columns named in `right` are aligned there and never wrapped."""
    new = Table(title=title)
    for heading in headings:
        number = heading in right
        new.add_column(
            heading, justify="right" if number else "left", overflow="fold", no_wrap=number
        )
    return new
