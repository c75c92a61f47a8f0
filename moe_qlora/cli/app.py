"""The program: its subcommands, `--version`, and its exit codes.

A subcommand is a function in `SUBCOMMANDS`, with command lines in its module's `EXAMPLES`. Exit
codes: 0 for success, 2 for bad input with one line on stderr, 130 for Ctrl-C, 141 if the output's
reader has closed it (`| head`); a subcommand names any others.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import MoeQloraError, one_line
from .doctor import doctor
from .dump import dump
from .folders import export, merge, quantize, report, verify
from .options import PANELS, option
from .plan import plan
from .render import streams

BAD_INPUT = 2
INTERRUPTED = 130  # typer's code as well
CLOSED_PIPE = 141  # a shell's code for SIGPIPE

SUBCOMMANDS: dict[Callable[..., Any], str] = {
    doctor: "What is fast here, what is not, and why.",
    dump: "Expert weights, bytes, lists for PEFT.",
    plan: "Memory of training, and what fits.",
    quantize: "A packed folder from a checkpoint.",
    verify: "Damage in a folder; the error of packing.",
    merge: "A plain checkpoint with an adapter merged.",
    report: "A page about a model, adapter or run.",
    export: "An adapter in the layout of a server.",
}
"""In the order of `moe-qlora --help`, with its text of at most 43 characters."""

PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
_UsageError: Any = typer.BadParameter.__base__  # of typer's click


class Panels(TyperCommand):
    """A command whose help groups its options where it has many; rich would draw boxes."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        many = len(self.params) > 10
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                title = PANELS.get(str(param.name), "Options") if many else "Options"
                title = "Arguments" if param.param_type_name == "argument" else title
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


app = typer.Typer(no_args_is_help=True, **PLAIN)
for command, short in SUBCOMMANDS.items():
    lines = sys.modules[command.__module__].EXAMPLES
    own = "".join(f"\n  {line}" for line in lines if line.split()[1] == command.__name__)
    app.command(cls=Panels, short_help=short, epilog=f"\b\nExamples:{own}")(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moe-qlora {__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nmoe-qlora --install-completion   completion for your shell, once\n"
    "moe-qlora plan --help            options and examples of a command"
)
def _program(
    version: bool = option(
        "Show the version.", "--version", default=False, callback=_version, is_eager=True
    ),
) -> None:
    """4-bit LoRA fine-tuning of Mixture-of-Experts models."""


def run(program: typer.Typer = app, prog_name: str = "moe-qlora", **arguments: Any) -> None:
    """Run a program, by default on `sys.argv`; an error of ours is one line and exit code 2."""
    with streams():
        try:
            code = _exit_code(program, prog_name=prog_name, **arguments)
            sys.stdout.flush()
        except (OSError, SystemExit) as error:
            # rich and typer exit with 1 at a closed pipe
            cause = error.__context__ if isinstance(error, SystemExit) else error
            if not isinstance(cause, OSError):
                raise
            code = CLOSED_PIPE if isinstance(cause, BrokenPipeError) else BAD_INPUT
            if code == BAD_INPUT:
                what = f"{cause.filename or 'what is printed'} cannot be read or written"
                sys.stderr.write(one_line("error", f"{what}: {cause.strerror or cause}."))
            try:
                sys.stdout.flush()
            except OSError:  # Python would try again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _exit_code(program: typer.Typer, **arguments: Any) -> int:
    try:
        code = program(standalone_mode=False, **arguments) or 0
        if code == INTERRUPTED:
            said = "nothing new stays on disk, and what was there is unchanged."
            sys.stderr.write(one_line("interrupted", said))
        return int(code)
    except MoeQloraError as error:
        sys.stderr.write(one_line("error", error))
        return BAD_INPUT
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # the help
        else:
            message = error.format_message().rstrip(".").replace("Value error, ", "")
            where = f"; {error.ctx.command_path} --help says what there is" if error.ctx else ""
            sys.stderr.write(one_line("error", f"{message}{where}."))
        return int(error.exit_code)
