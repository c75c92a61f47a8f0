"""`moe-qlora merge BASE ADAPTER OUT`: a plain checkpoint with the adapter in its weights."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import AnyBase, Float, Quant, Quiet, trust_remote_code_of

EXAMPLES = (
    "moe-qlora merge ./model ./adapter ./merged",
    "moe-qlora merge ./model-nf4 ./adapter ./merged --dtype bfloat16",
    "moe-qlora merge ./model ./adapter ./merged --like-training",
)


def merge(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="Checkpoint folder: 16-bit, as its maker quantized it, or packed by moe-qlora.",
        ),
    ],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="Folder that PEFT saved the adapter to.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New folder; nothing is overwritten.")],
    dtype: Annotated[
        Float | None, typer.Option(help="Of the merged weights; default: each as it is in BASE.")
    ] = None,
    like_training: Annotated[
        bool,
        typer.Option(
            "--like-training",
            help="Round BASE first as the weights were rounded that ADAPTER was trained on.",
        ),
    ] = False,
    quant: Annotated[
        Quant | None,
        typer.Option(help="With --like-training: the packed type, where no file tells."),
    ] = None,
    double_quant: Annotated[
        bool,
        typer.Option("--double-quant", help="With --quant: the statistics were quantized too."),
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="With --quant: a module that stayed in 16 bit; may be repeated."),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(help="Of the files, where BASE is packed or quantized; else BASE's are kept."),
    ] = "5GB",
    any_base: AnyBase = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("BASE")] = False,
    quiet: Quiet = False,
) -> None:
    """Merge a LoRA adapter into its base, a few experts at a time; no model is ever loaded.

    OUT has the original layout of the checkpoint, so that whatever loads BASE's original loads it.
    """
    from ..errors import ConfigError
    from ..progress import reporting

    if quant is None and (double_quant or skip):
        raise ConfigError("--double-quant and --skip go with --quant; give the packed type.")
    if quant is not None and not like_training:
        raise ConfigError("--quant goes with --like-training; give both, or neither.")
    if double_quant and quant is Quant.int8:
        raise ConfigError("--double-quant is for nf4 and fp4; leave it out with int8.")
    shown = not quiet and sys.stderr.isatty()
    with reporting(shown, f"Reading {base}", "Merged", stderr=True, transient=True) as tell:
        import torch

        from ..checkpoint.merge import merge_adapter
        from ..packing.settings import CodecSettings

        config = None
        if quant is not None:
            config = CodecSettings(quant.value, double_quant, skip_modules=tuple(skip or ()))
        report = merge_adapter(
            base,
            adapter,
            out,
            dtype=getattr(torch, dtype) if dtype else None,
            like_training=like_training,
            quantization_config=config and config.bnb_fields(),
            max_shard_size=max_shard_size,
            any_base=any_base,
            trust_remote_code=trust_remote_code,
            progress=tell,
        )
    sys.stdout.write(f"{report}\n")
