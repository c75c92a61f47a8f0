"""`moe-qlora quantize SRC DST`: a packed folder from a checkpoint of 16 bits, or its maker's."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from ..layout import human_bytes
from .options import Float, Quant, Quiet, trust_remote_code_of

EXAMPLES = (
    "moe-qlora quantize ./model ./model-nf4",
    "moe-qlora quantize ./model ./packed --quant int8 --device cpu",
    "moe-qlora quantize ./gpt-oss-20b ./packed --skip lm_head",
)

Storage = StrEnum("Storage", ["uint8", "bfloat16", "float16", "float32"])


def quantize(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Checkpoint folder (safetensors), 16-bit or as its maker quantized it.",
        ),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="New folder; nothing is overwritten.")],
    quant: Annotated[Quant, typer.Option(help="What to pack to.")] = Quant.nf4,
    double_quant: Annotated[
        bool,
        typer.Option("--double-quant/--no-double-quant", help="Quantize the statistics as well."),
    ] = True,
    compute_dtype: Annotated[
        Float, typer.Option(help="What packed layers compute in.")
    ] = Float.bfloat16,
    storage: Annotated[Storage, typer.Option(help="How 4-bit codes are stored.")] = Storage.uint8,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="A module to leave in 16 bit (llm_int8_skip_modules); may be repeated."),
    ] = None,
    dtype: Annotated[
        Float | None, typer.Option(help="Of what is not packed; default: as in SRC.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to pack; default: a GPU where there is one.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of the files of DST.")] = "5GB",
    trust_remote_code: Annotated[bool, trust_remote_code_of("SRC")] = False,
    quiet: Quiet = False,
) -> None:
    """Pack a checkpoint without ever holding the model.

    DST loads in seconds: `with moe_qlora.enabled(): AutoModelForCausalLM.from_pretrained(DST)`.
    """
    from ..progress import reporting

    shown = not quiet and sys.stderr.isatty()
    with reporting(shown, f"Reading {src}", "Packed", stderr=True, transient=True) as tell:
        import torch

        from ..checkpoint.save import quantize_checkpoint
        from ..packing.settings import CodecSettings

        settings = CodecSettings(
            quant.value,
            double_quant,
            getattr(torch, storage),
            getattr(torch, compute_dtype),
            skip_modules=tuple(skip or ()),
        )
        manifest = quantize_checkpoint(
            src,
            dst,
            settings.bnb_fields(),
            dtype=getattr(torch, dtype) if dtype else None,
            device=device,
            max_shard_size=max_shard_size,
            progress=tell,
            trust_remote_code=trust_remote_code,
        )
    total = sum(shard["nbytes"] for shard in manifest.shards.values())
    typer.echo(
        f"{dst}: {len(manifest.experts)} expert weights packed to {manifest.codec['kind']}, "
        f"{human_bytes(total)} in {len(manifest.shards)} file{'s' * (len(manifest.shards) > 1)}."
    )
