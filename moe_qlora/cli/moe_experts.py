"""`axolotl moe-experts config.yml`: `moe-qlora dump` and `plan` among axolotl's own subcommands.

axolotl finds it by its entry point and asks for a command of click, which it brings; typer
brings another click.
"""

from __future__ import annotations

from typing import Annotated

import click
import typer

from .options import Color, Colored, Json


@click.command(
    short_help="show the expert parameters of the base model, or with --gpus what training takes",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def moe_experts(arguments: tuple[str, ...]) -> None:
    """Show every expert parameter of the model that an axolotl file names, or plan its training."""
    from .app import alone, run
    from .dump import dump

    planned = any(word.partition("=")[0] == "--gpus" for word in arguments)
    program = alone(plan_config if planned else dump)
    run(program, "axolotl moe-experts", args=list(arguments))


def plan_config(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="axolotl's YAML file.")],
    gpus: Annotated[str, typer.Option(help="Devices, as moe-qlora plan takes them.")],
    as_json: Json = False,
    color: Colored = Color.auto,
) -> None:
    """Show what training takes on --gpus by CONFIG, as axolotl has validated it.

    Ends with 0, with 4 where it does not fit, and with 2 where CONFIG or a setting cannot be read.
    """
    from ..integrations.axolotl import read_config
    from ..integrations.settings import plan_arguments
    from ..models.files import place_of
    from . import render
    from .plan import show

    place_of(config)
    with render.working(f"Rehearsing a training step of {config}"):
        from ..memory.plan import devices_of, plan_settings

        arguments = plan_arguments(read_config(config), len(devices_of(gpus)[0]))
        report = plan_settings(gpus=gpus, **arguments)
    show(report, f"moe-qlora plan {report.label} --gpus {gpus}", as_json=as_json, color=color)
