"""`moe-qlora serve-check BASE ADAPTER --with SERVER`: does the server serve what was trained?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import AnyBase, Float
from .render import working

EXAMPLES = (
    "moe-qlora serve-check ./base ./lora --with vllm",
    "moe-qlora serve-check ./base ./lora --with vllm --python ./py",
    "moe-qlora serve-check ./b ./lora --with llama.cpp --llama-cpp ./src",
)
NOT_SERVED = 1


def serve_check(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Folder of the 16-bit model that is served.")
    ],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="Folder of the adapter, in any layout.")
    ],
    server: Annotated[str, typer.Option("--with", help="The server: vllm or llama.cpp.")],
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter of the environment that holds it; default: this one."),
    ] = None,
    llama_cpp: Annotated[
        str | None, typer.Option("--llama-cpp", help="llama.cpp's source folder (converters).")
    ] = None,
    dtype: Annotated[Float, typer.Option(help="That both compute in.")] = Float.bfloat16,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="Give ADAPTER as it is, without an export.")
    ] = False,
    any_base: AnyBase = False,
) -> None:
    """Run prompts through a server's engine, with and without the adapter, and compare with ours.

    The engine runs in a process of its own. Exit code 1: it does not serve what was trained.
    """
    with working(f"Asking {server}"):
        import torch

        from ..serving.check import serve_check as check

        report = check(
            base,
            adapter,
            server=server,
            python=python,
            llama_cpp=llama_cpp,
            dtype=getattr(torch, dtype.value),
            as_it_is=as_it_is,
            any_base=any_base,
        )
    sys.stdout.write(f"{report}\n")
    if not report.ok:
        raise typer.Exit(NOT_SERVED)
