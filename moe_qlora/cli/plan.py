"""`moe-qlora plan MODEL`: print what a model takes on its devices, loading and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Color,
    Colored,
    Json,
    Model,
    ModelDoubleQuant,
    ModelQuant,
    codec_settings,
    trust_remote_code_of,
)

DOES_NOT_FIT = 4

Gpus = Annotated[str | None, typer.Option(help="Devices: 24GiB, 2x24GiB, or 24GiB,2x48GiB.")]
Targets = Annotated[
    str, typer.Option(help="What gets LoRA: attention, all-linear, experts, or names, by comma.")
]
AdapterDtype = Annotated[
    str, typer.Option(help="Of the adapters: float32 (PEFT's default) or bfloat16.")
]
Optimizer = Annotated[str, typer.Option(help="adamw, adamw_8bit, paged_adamw or paged_adamw_8bit.")]
Checkpointing = Annotated[
    bool,
    typer.Option("--checkpointing/--no-checkpointing", help="Compute layers again in backward."),
]
Chart = Annotated[Path | None, typer.Option(help="Write a stacked bar chart to this PNG file.")]


def plan(
    model: Model,
    gpus: Gpus = None,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Micro-batches to an optimizer step.")] = 1,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 16,
    targets: Targets = "attention",
    adapter_dtype: AdapterDtype = "float32",
    optimizer: Optimizer = "adamw",
    checkpointing: Checkpointing = True,
    quant: ModelQuant = None,
    double_quant: ModelDoubleQuant = None,
    as_json: Json = False,
    chart: Chart = None,
    trust_remote_code: Annotated[bool, trust_remote_code_of("MODEL")] = False,
    color: Colored = Color.auto,
) -> None:
    """Show what MODEL takes, whether it fits, where its layers go, and what to change if not.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 4 where it does not fit
    the devices of --gpus, and with 2 where MODEL or a setting cannot be read.
    """
    from ..build import named
    from ..memory.plan import plan as plan_memory
    from . import chart as charts
    from . import render, render_plan

    if chart is not None:
        charts.check(chart)
    source = named.resolve(model, trust_remote_code=trust_remote_code)
    report = plan_memory(
        source,
        codec_settings(source.settings, quant, double_quant),
        gpus=gpus,
        batch=batch,
        seq=seq,
        rank=rank,
        targets=targets,
        adapter_dtype=adapter_dtype,
        optimizer=optimizer,
        checkpointing=checkpointing,
        accumulation=accumulation,
        trust_remote_code=trust_remote_code,
    )
    if chart is not None:
        with charts.writing(chart):
            charts.draw(report, chart)
    if as_json:
        render.print_json(report.as_dict())
    else:
        render_plan.show(report, render.console(color.value))
    if report.fits is False:
        raise typer.Exit(DOES_NOT_FIT)
