"""`moe-qlora verify FOLDER`: is it whole, and how far are its packed weights from their source?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Color, Colored, Quiet, trust_remote_code_of

DAMAGED = 1
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
    from . import render

    shown = not quiet and sys.stderr.isatty()
    with reporting(shown, f"Reading {folder}", "Checked", stderr=True, transient=True) as tell:
        from ..checkpoint.verify import verify as check
        from . import render_verify

        report = check(folder, against, trust_remote_code=trust_remote_code, progress=tell)
    if as_json:
        render.print_json(report.as_dict())
    else:
        for kind, sentences in (("warning", report.warnings), ("damaged", report.problems)):
            for sentence in sentences:
                sys.stderr.write(one_line(kind, sentence))
        render_verify.show(report, render.console(color.value))
    if not report.good:
        raise typer.Exit(DAMAGED)
