"""What goes to stderr, once and on one line: errors, warnings, interruptions; and what does not.

    error: ...          a `MoeQloraError`, or arguments that the program does not have
    warning: ...        a warning, or a log record of WARNING, of this package
    interrupted: ...    Ctrl-C

Warnings and log records of other libraries are left out, but for log records of ERROR: they are
about imports and models that are only looked at. `python -W default -m moe_qlora.cli` shows them.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import did_you_mean, one_line, visible

_PACKAGE = __name__.partition(".")[0]


class Interrupted(Exception):  # noqa: N818 - no error
    """Ctrl-C, where more is to be said than that nothing was left."""


@contextmanager
def streams() -> Iterator[None]:
    """Filter both streams, and what libraries say on stderr, as long as this lasts.

    What goes to a stream that whoever started the program had closed goes nowhere.
    """
    root, handler = logging.getLogger(), _OneLine()
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(_Filtered(sys.stdout or nowhere)),
        redirect_stderr(_Filtered(sys.stderr or nowhere)),
        warnings.catch_warnings(),
    ):
        if not sys.warnoptions:
            warnings.showwarning = _show_warning
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


def usage_message(error: Any) -> str:
    """Return the sentence for arguments that the program does not have, from typer's exception."""
    name, near = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
    message = str(error.format_message()).rstrip(".").replace("Value error, ", "")
    message = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", message)
    if near is not None:
        message = f"There is no option {name}{did_you_mean(name, near)}"
    elif name:
        message = str(error.message).rstrip(".")
    if error.ctx is None:
        return f"{message}."
    return f"{message}; {error.ctx.command_path} --help says what there is."


class _Filtered:
    """A stream of text in which control characters are seen, whoever writes them.

    A carriage return may lead, as it does in tqdm's bars.
    """

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
    """Writes our own log records from WARNING on, and others' from ERROR on."""

    def emit(self, record: logging.LogRecord) -> None:
        own = record.name.partition(".")[0] == _PACKAGE
        if record.levelno >= (logging.WARNING if own else logging.ERROR):
            kind = "warning" if record.levelno < logging.ERROR else "error"
            source = "" if own else f" ({record.name})"
            sys.stderr.write(one_line(f"{kind}{source}", record.getMessage()))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any
) -> None:
    """Write a warning of this package on one line; what others warn of is left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    caller = "" if frame is None else str(frame.f_globals.get("__name__"))
    if caller.partition(".")[0] == _PACKAGE:
        sys.stderr.write(one_line("warning", message))
