"""`moe-qlora report FOLDER_OR_RUN -o FILE`: one page about a model, an adapter or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import ModelDoubleQuant, ModelQuant, Quiet, codec_settings, trust_remote_code_of

EXAMPLES = (
    "moe-qlora report ./model-nf4 --against ./model",
    "moe-qlora report ./my-run --text train.jsonl -o run.html",
    "moe-qlora report qwen3_moe --quant nf4",
)


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER_OR_RUN",
            help="Checkpoint folder, packed or not, adapter, Trainer's run, or what dump takes.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    against: Annotated[
        Path | None,
        typer.Option(help="Folder that the model was packed from: show the error of packing."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="JSONL, JSON or text file: load the model, and show which experts it goes to."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Model of an adapter or run that names none that is here.")
    ] = None,
    batch: Annotated[int | None, typer.Option(hidden=True)] = None,
    seq: Annotated[int | None, typer.Option(hidden=True)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of --text.")] = 16384,
    quant: ModelQuant = None,
    double_quant: ModelDoubleQuant = None,
    trust_remote_code: Annotated[bool, trust_remote_code_of("FOLDER_OR_RUN")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a page with bytes by part, packing error, routing, and the curves of a run.

    It is one file for any browser, without scripts and network. What cannot be measured from what
    is given says so in a sentence. Ends with 0, and with 2 where something cannot be read.
    """
    from ..report.write import write_report

    out = out.expanduser()
    if batch is not None or seq is not None:
        typer.echo("note: --batch and --seq are ignored; moe-qlora plan plans a step.", err=True)
    asked = quant is not None or double_quant is not None
    missing = write_report(
        source,
        out,
        against=against,
        text=text,
        base=base,
        quantization_config=codec_settings(None, quant, double_quant) if asked else None,
        max_tokens=max_tokens,
        trust_remote_code=trust_remote_code,
    )
    names = ", ".join(missing).lower()
    without = f"; left out: {names} (the page says why)" if missing else ""
    typer.echo(f"{out}: {out.stat().st_size / 1024:.0f} KiB{without}.")
