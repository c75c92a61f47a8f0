"""`moe-qlora export ADAPTER --base BASE --for SERVER -o OUT`: the layout that a server takes."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from .options import AnyBase, trust_remote_code_of
from .render import working

EXAMPLES = (
    "moe-qlora export ./adapter --base ./model --for vllm -o ./served",
    "moe-qlora export ./served --base ./model --for peft -o ./again",
)

Server = StrEnum("Server", ["vllm", "sglang", "gguf", "peft"])  # as in serving/servers.json


def export(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="Folder of the adapter, in any layout.")
    ],
    base: Annotated[
        str, typer.Option("--base", metavar="BASE", help="Folder of the model it was trained on.")
    ],
    target: Annotated[Server, typer.Option("--for", help="The server that is to load it.")],
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="OUT", help="New folder; nothing is overwritten.")
    ],
    any_base: AnyBase = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("BASE")] = False,
) -> None:
    """Write a LoRA adapter in the layout that a server takes for its architecture.

    gguf is the folder that llama.cpp's convert_lora_to_gguf.py takes; peft is PEFT's own layout.
    """
    with working("Exporting"):
        from ..serving.export import export_adapter

        report = export_adapter(
            adapter,
            out,
            base=base,
            target=target.value,
            any_base=any_base,
            trust_remote_code=trust_remote_code,
        )
    sys.stdout.write(f"{report}\n")
