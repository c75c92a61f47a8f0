"""The program: its subcommands, `--version`, and its exit codes.

A new subcommand is a file with a function of its name and `EXAMPLES`, command lines that `--help`
shows; add it to `SUBCOMMANDS`. It prints with what render.py has: `console`, `say`,
`show_table`, and `working` around what takes over two seconds.

Exit codes: 0 for success, 2 for bad input with one line on stderr, 130 for Ctrl-C, 141 where the
output's reader has closed it (`| head`); a subcommand names any others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import MoeQloraError, one_line
from .bench import bench
from .doctor import doctor
from .dump import dump
from .export import export
from .merge import merge
from .options import Subcommand
from .plan import PlanCommand, plan
from .quantize import quantize
from .render import streams, usage_message
from .report import report
from .verify import verify

BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # a shell's code for SIGPIPE

SUBCOMMANDS: dict[Callable[..., Any], str] = {
    doctor: "What is fast here, what is not, and why.",
    dump: "Expert weights, bytes, lists for PEFT.",
    plan: "Memory of training, and what fits.",
    quantize: "A packed folder from a checkpoint.",
    verify: "Is a folder whole; the error of packing.",
    merge: "A plain checkpoint with an adapter merged.",
    bench: "How fast a model trains on this card.",
    report: "A page about a model, adapter or run.",
    export: "An adapter in the layout of a server.",
}
"""In the order of `moe-qlora --help`, with its text of at most 43 characters."""

_PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
_UsageError: Any = typer.BadParameter.__base__  # of typer's click


app = typer.Typer(no_args_is_help=True, **_PLAIN)
for command, short in SUBCOMMANDS.items():
    examples = "\n".join(f"  {line}" for line in sys.modules[command.__module__].EXAMPLES)
    kind = PlanCommand if command is plan else Subcommand
    app.command(cls=kind, short_help=short, epilog=f"\b\nExamples:\n{examples}")(command)


def alone(command: Callable[..., None]) -> typer.Typer:
    """Return a program of one command, for another program."""
    program = typer.Typer(add_completion=False, **_PLAIN)
    program.command()(command)
    return program


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-qlora {__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nmoe-qlora --install-completion   completion for your shell, once\n"
    "moe-qlora plan --help            options and examples of a command"
)
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """4-bit LoRA fine-tuning of Mixture-of-Experts models."""


def run(program: typer.Typer = app, prog_name: str = "moe-qlora", **arguments: Any) -> None:
    """Run a program, by default on `sys.argv`; an error of ours is one line and exit code 2."""
    with streams():
        try:
            code = _exit_code(program, prog_name=prog_name, **arguments)
        except BrokenPipeError:
            code = CLOSED_PIPE
        except SystemExit as stop:  # rich and typer exit with 1
            if not isinstance(stop.__context__, BrokenPipeError):
                raise
            code = CLOSED_PIPE
    try:
        written = _flushed()
    except OSError as error:  # a full disk
        sys.stderr.write(_of_system(error))
        written, code = True, code or BAD_INPUT
    sys.exit(code if written else CLOSED_PIPE)


def _exit_code(program: typer.Typer, **arguments: Any) -> int:
    try:
        code = program(standalone_mode=False, **arguments)
        if code == INTERRUPTED:  # typer's code for Ctrl-C
            sys.stderr.write(one_line("interrupted", "nothing is left half written."))
    except MoeQloraError as error:
        sys.stderr.write(one_line("error", error))
        code = BAD_INPUT
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which shows help
            error.show()
        else:
            sys.stderr.write(one_line("error", usage_message(error)))
        code = int(error.exit_code)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stderr.write(_of_system(error))
        code = BAD_INPUT
    return code or 0


def _of_system(error: OSError) -> str:
    where = error.filename or "what is printed"
    return one_line("error", f"{where} cannot be read or written: {error.strerror or error}.")


def _flushed() -> bool:
    """Flush both streams; False if one is a pipe that its reader has closed."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed before the program started
                stream.flush()
        except OSError as error:  # Python would raise again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
            written = False
    return written
