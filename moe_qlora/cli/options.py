"""Options that several subcommands take, and what they stand for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer


class Quant(StrEnum):
    """The packed types that `--quant` takes."""

    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"


class Float(StrEnum):
    """The dtypes that `--dtype` and `--compute-dtype` take."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Color(StrEnum):
    """When to colour."""

    auto = "auto"
    always = "always"
    never = "never"


def bnb_settings(quant: Quant, double_quant: bool, skip: list[str] | None) -> dict[str, Any]:
    """Return the arguments of the `BitsAndBytesConfig` that the options stand for."""
    settings: dict[str, Any] = {"load_in_8bit": True}
    if quant is not Quant.int8:
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant.value,
            "bnb_4bit_use_double_quant": double_quant,
        }
    if skip:
        settings["llm_int8_skip_modules"] = skip
    return settings


Model = Annotated[
    str,
    typer.Argument(
        help="Checkpoint folder, config.json, axolotl-style YAML, model type or hub id."
    ),
]
ModelQuant = Annotated[
    Quant | None, typer.Option(help="Packed type; default: what MODEL says, else nf4.")
]
ModelDoubleQuant = Annotated[
    bool | None,
    typer.Option(
        "--double-quant/--no-double-quant",
        help="Quantize the statistics too; default: what MODEL says, else yes.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code that MODEL brings.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Colored = Annotated[Color, typer.Option("--color", help="When to colour.")]
