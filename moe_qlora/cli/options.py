"""Options of several subcommands."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..packing.settings import CodecSettings

Quant = StrEnum("Quant", ["nf4", "fp4", "int8"])  # packed types
Float = StrEnum("Float", ["bfloat16", "float16", "float32"])
Color = StrEnum("Color", ["auto", "always", "never"])

# Headings of long helps, by an option's name in any command; others stand under "Options".
_PANELS = {
    "Devices": "gpus ddp fsdp offload device",
    "A step": "seq batch optimizer checkpointing attention prepared",
    "LoRA": "rank targets adapter_dtype",
    "Packing": "quant double_quant compute_dtype storage skip like_training dtype",
    "Files": "against text base max_tokens max_shard_size any_base out",
    "Output": "as_json quiet color why peft yaml",
}
PANELS = {name: panel for panel, names in _PANELS.items() for name in names.split()}


def argument(metavar: str, text: str, **more: Any) -> Any:
    """Return a required argument with its help."""
    return typer.Argument(metavar=metavar, help=text, **more)


def option(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option with its help."""
    return typer.Option(default, *names, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option that is False, without its `--no-`."""
    return typer.Option(False, name, help=text)


def codec_settings(
    own: CodecSettings | None, quant: Quant | None, double_quant: bool | None
) -> CodecSettings:
    """Return MODEL's settings, or nf4 with double quantization, changed by the options."""
    import torch

    from ..packing.settings import CodecSettings

    default = CodecSettings(Quant.nf4.value, True, compute_dtype=torch.bfloat16)
    own = own or default
    double = own.double_quant if double_quant is None else double_quant
    if own.codec.loads_in_8bit and quant is not None:  # its storage dtype is not for 4-bit codes
        own = replace(default, skip_modules=own.skip_modules)
    return replace(own, kind=own.kind if quant is None else quant.value, double_quant=double)


def packed_as(
    own: CodecSettings | None, quant: Quant | None, double_quant: bool | None
) -> CodecSettings | None:
    """Return `codec_settings`, or None without options: MODEL's own settings count."""
    return codec_settings(own, quant, double_quant) if quant or double_quant is not None else None


def _model_names(incomplete: str) -> list[str]:
    """Complete a model name for the shell; without a match it completes paths."""
    from ..registry import checkpoints, model_types

    shorts = [known.short for known in checkpoints()]
    return [name for name in (*model_types(), *shorts) if name.startswith(incomplete)]


_KINDS = "Checkpoint folder, config.json, known checkpoint (qwen3-30b-a3b), model type or hub id."
_MODEL = argument("MODEL", _KINDS, autocompletion=_model_names)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
ModelQuant = Annotated[Quant | None, typer.Option(help="Packed type; default: MODEL's, else nf4.")]
ModelDoubleQuant = Annotated[
    bool | None, typer.Option(help="Quantize the statistics too; default: as MODEL says, else yes.")
]
AnyBase = Annotated[
    bool, typer.Option("--any-base", help="Take a BASE that is not the adapter's by its note.")
]
Remote = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code that the checkpoint brings.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")]
Colored = Annotated[Color, typer.Option("--color", help="When to colour.")]
