"""`moe-qlora verify FOLDER`: is it whole, and how large is its quantization error?"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..layout import human_bytes, name_pattern
from . import render
from .options import Color, Colored, Quiet, trust_remote_code_of

if TYPE_CHECKING:
    from ..checkpoint.verify import VerifyReport, WeightError

DAMAGED = 1
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # which `name_pattern` replaces by `*`
EXAMPLES = (
    "moe-qlora verify ./model-nf4",
    "moe-qlora verify ./model-nf4 --against ./model",
)


def verify(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Checkpoint folder, packed by moe-qlora or plain."),
    ],
    against: Annotated[
        Path | None,
        typer.Option(help="Folder that FOLDER was packed from: show the error of packing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("--against")] = False,
    quiet: Quiet = False,
    color: Colored = Color.auto,
) -> None:
    """Check a checkpoint's files, checksums, shapes and statistics; nothing is written to it.

    Ends with 0 where all is well, with 1 where something is damaged (named on stderr, or in the
    JSON), and with 2 where FOLDER is no checkpoint or a setting cannot be followed.
    """
    from ..errors import one_line
    from ..progress import reporting

    shown = not quiet and sys.stderr.isatty()
    with reporting(shown, f"Reading {folder}", "Checked", stderr=True, transient=True) as tell:
        from ..checkpoint.verify import verify as check

        report = check(folder, against, trust_remote_code=trust_remote_code, progress=tell)
    if as_json:
        render.print_json(report.as_dict())
    else:
        for kind, sentences in (("warning", report.warnings), ("damaged", report.problems)):
            for sentence in sentences:
                sys.stderr.write(one_line(kind, sentence))
        _show(report, render.console(color.value))
    if not report.good:
        raise typer.Exit(DAMAGED)


def _show(report: VerifyReport, out: Console) -> None:
    if report.errors:
        title = f"{escape(str(report.folder))}: error of {report.kind}, relative (Frobenius)"
        headings = ("parameter", ">count", "shape", ">error", ">worst", "where")
        render.show_table(out, title, headings, _error_rows(report.errors))
    if not report.good:
        return
    what = "plain" if report.kind == "plain" else f"packed as {report.kind}"
    if report.method:
        what = f"quantized by its maker ({escape(report.method)})"
    files = f"{report.files} file{'' if report.files == 1 else 's'}"
    content = f"{report.tensors} tensors in {files}, {human_bytes(report.nbytes)}"
    more = f"; {report.experts} expert weights, {report.linears} Linear layers packed"
    if report.kind == "plain":
        codes = f"; {report.dequantized} weights are codes, and are read dequantized"
        more = codes if report.dequantized else ""
    whole = f"[green]{escape(str(report.folder))} is whole[/]"
    render.say(out, f"{whole}: {what}, {content}{more}.")


def _error_rows(errors: Sequence[WeightError]) -> Iterator[tuple[str, ...] | None]:
    linears: dict[str, list[WeightError]] = {}
    for error in errors:
        if not error.expert:
            linears.setdefault(name_pattern(error.name), []).append(error)
            continue
        yield (
            escape(error.name),
            "1",
            "x".join(map(str, error.shape)),
            f"{error.relative:.2%}",
            f"{max(error.experts):.2%}",
            f"expert {error.experts.index(max(error.experts))}",
        )
    yield None
    for pattern, alike in linears.items():
        worst = max(alike, key=lambda error: error.relative)
        shapes = {"x".join(map(str, error.shape)) for error in alike}
        yield (
            escape(pattern),
            str(len(alike)),
            shapes.pop() if len(shapes) == 1 else "various",
            f"{sum(error.relative for error in alike) / len(alike):.2%}",
            f"{worst.relative:.2%}",
            f"* = {', '.join(numbers)}" if (numbers := _NUMBER.findall(worst.name)) else "",
        )
