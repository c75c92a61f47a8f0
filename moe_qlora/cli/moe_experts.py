"""`axolotl moe-experts config.yml`: `moe-qlora dump` and `plan` among axolotl's own subcommands.

axolotl finds it by its entry point and asks for a command of click, which it brings; typer
brings another click.
"""

from functools import wraps
from typing import Any

import click
import typer

from . import options as opt


@click.command(
    short_help="show the expert parameters of the base model, or with --gpus what training takes",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def moe_experts(arguments: tuple[str, ...]) -> None:
    """Show every expert parameter of the model that an axolotl file names, or plan its training."""
    from .app import PLAIN, run
    from .dump import dump

    @wraps(dump)
    def dump_config(model: str, **options: Any) -> None:
        from ..integrations.axolotl import read_config

        dump(read_config(model).base_model, **options)

    planned = any(word.partition("=")[0] == "--gpus" for word in arguments)
    program = typer.Typer(add_completion=False, **PLAIN)
    program.command()(plan_config if planned else dump_config)
    run(program, "axolotl moe-experts", args=list(arguments))


def plan_config(
    config: str = opt.argument("CONFIG", "axolotl's YAML file."),
    gpus: str = opt.option("Devices, as moe-qlora plan takes them.", default=...),
    as_json: opt.Json = False,
    color: opt.Colored = opt.Color.auto,
) -> None:
    """Show what training takes on --gpus by CONFIG, as axolotl has validated it.

    Ends with 0, with 4 where it does not fit, and with 2 where CONFIG or a setting cannot be read.
    """
    from ..integrations.axolotl import read_config
    from ..integrations.settings import plan_arguments
    from . import render
    from .plan import show

    with render.working(f"Rehearsing a training step of {config}"):
        from ..planning.devices import devices_of
        from ..planning.plan import plan_settings

        arguments = plan_arguments(read_config(config), len(devices_of(gpus)[0]))
        report = plan_settings(gpus=gpus, **arguments)
    show(report, f"moe-qlora plan {report.label} --gpus {gpus}", as_json=as_json, color=color)
