"""The program itself: its subcommands, `--version`, and how errors end it.

Exit codes: 0 for success, 2 for bad input with one line on stderr; a subcommand names any others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import MoeQloraError, one_line, visible
from .dump import dump
from .merge import merge
from .plan import PlanCommand, plan
from .quantize import quantize
from .verify import verify

BAD_INPUT = 2

_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}

app = typer.Typer(no_args_is_help=True, **_PLAIN)
dump_alone = typer.Typer(**_PLAIN)  # the subcommand of another program
dump_alone.command()(dump)
for command in (dump, merge, plan, quantize, verify):
    app.command(cls=PlanCommand if command is plan else None)(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-qlora {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """4-bit LoRA fine-tuning of Mixture-of-Experts models."""


def run(program: typer.Typer = app, **arguments: Any) -> None:
    """Run a program, by default on `sys.argv`; an error of ours is one line and exit code 2."""
    with redirect_stdout(_Filtered(sys.stdout)), redirect_stderr(_Filtered(sys.stderr)):
        try:
            program(**arguments)
        except MoeQloraError as error:
            sys.stderr.write(one_line("error", error))
            sys.exit(BAD_INPUT)


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
