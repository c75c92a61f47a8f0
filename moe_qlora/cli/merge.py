"""`moe-qlora merge BASE ADAPTER OUT`: a plain checkpoint with the adapter in its weights."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from .options import Float, Quant, bnb_settings


def merge(
    base: Annotated[
        str, typer.Argument(help="16-bit checkpoint folder, or one that moe-qlora has packed.")
    ],
    adapter: Annotated[str, typer.Argument(help="Folder that PEFT saved the adapter to.")],
    out: Annotated[str, typer.Argument(help="New folder; nothing is overwritten.")],
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
        str, typer.Option(help="Of the files, where BASE is packed; else BASE's own are kept.")
    ] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that BASE brings.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")] = False,
) -> None:
    """Merge a LoRA adapter into its base, a few experts at a time; no model is ever loaded.

    OUT has the original layout of the checkpoint, so that whatever loads BASE's original loads it.
    """
    import torch

    from ..checkpoint.merge import merge_adapter
    from ..errors import ConfigError

    if quant is not None and not like_training:
        raise ConfigError("--quant goes with --like-training; give both, or neither.")
    report = merge_adapter(
        base,
        adapter,
        out,
        dtype=None if dtype is None else getattr(torch, dtype.value),
        like_training=like_training,
        quantization_config=_config(quant, double_quant, skip),
        max_shard_size=max_shard_size,
        trust_remote_code=trust_remote_code,
        progress=not quiet,
    )
    sys.stdout.write(f"{report}\n")


def _config(quant: Quant | None, double_quant: bool, skip: list[str] | None) -> Any:
    """Return the settings that the options stand for; None without `--quant`."""
    from ..errors import ConfigError

    if quant is None:
        if double_quant or skip:
            raise ConfigError("--double-quant and --skip go with --quant; give the packed type.")
        return None
    if double_quant and quant is Quant.int8:
        raise ConfigError("--double-quant is for nf4 and fp4; leave it out with int8.")
    return bnb_settings(quant, double_quant, skip)
