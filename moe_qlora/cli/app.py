"""The program itself: its subcommands, `--version`, and how errors end it.

Exit codes: 0 for success, 2 for bad input with one line on stderr; a subcommand names any others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from .. import __version__
from ..errors import MoeQloraError
from .dump import dump
from .merge import merge
from .plan import plan
from .quantize import quantize
from .verify import verify

BAD_INPUT = 2

app = typer.Typer(
    help="4-bit LoRA fine-tuning of Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(dump)
app.command()(merge)
app.command()(plan)
app.command()(quantize)
app.command()(verify)


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


def run() -> None:
    """Run the program on `sys.argv`; an error of this package is one line and exit code 2."""
    with _one_line():
        app()


def run_dump(arguments: list[str], name: str) -> None:
    """Run `dump` alone, as the subcommand `name` of another program."""
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command()(dump)
    with _one_line():
        single(args=arguments, prog_name=name)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except MoeQloraError as error:
        sys.stderr.write("error: " + " ".join(str(error).split()) + "\n")
        sys.exit(BAD_INPUT)
