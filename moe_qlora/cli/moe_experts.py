"""`axolotl moe-experts config.yml`: `moe-qlora dump` among axolotl's own subcommands.

axolotl finds it by its entry point and asks for a command of click, which it brings; typer
brings another click.
"""

from __future__ import annotations

import click


@click.command(
    short_help="show the expert parameters of the base model, and what packing them saves",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def moe_experts(arguments: tuple[str, ...]) -> None:
    """Show every expert parameter of the model that an axolotl file names."""
    from .app import dump_alone, run

    run(dump_alone, "axolotl moe-experts", args=list(arguments))
