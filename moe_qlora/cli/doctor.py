"""`moe-qlora doctor [MODEL]`: what runs fast here, what falls back and why, and what breaks."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    Color,
    Colored,
    Json,
    ModelDoubleQuant,
    ModelQuant,
    OptionalModel,
    gpu_names,
    packed_as,
    trust_remote_code_of,
)

HAS_PROBLEMS = 1
EXAMPLES = (
    "moe-qlora doctor",
    "moe-qlora doctor ./model",
    "moe-qlora doctor gpt-oss-20b --gpu 4090",
    "moe-qlora doctor train.yaml --json",
)


def doctor(
    model: OptionalModel = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A card to answer for, such as 4090; default: what is here.",
            autocompletion=gpu_names,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="LoRA rank on the experts; default: what MODEL says, else 16."),
    ] = None,
    quant: ModelQuant = None,
    double_quant: ModelDoubleQuant = None,
    as_json: Json = False,
    trust_remote_code: Annotated[bool, trust_remote_code_of("MODEL")] = False,
    color: Colored = Color.auto,
) -> None:
    """Examine versions and devices and, given MODEL, how each of its expert layers is computed.

    Says for each kind of layer which backend computes it and why, and what a fallback costs; and
    which of the installed versions are known not to work together, with what to do.

    Nothing is loaded or downloaded but the configuration. Ends with 0, with 1 where a problem was
    found (a warning is none), and with 2 where MODEL or a setting cannot be read.
    """
    from ..models.files import place_of
    from . import render

    if model is not None:
        place_of(model)
    with render.working(f"Examining {model or 'this environment'}"):
        from ..diagnosis.doctor import doctor as examine
        from ..models import named
        from . import render_doctor

        source = settings = None
        if model is not None:
            source = named.resolve(model, trust_remote_code=trust_remote_code)
            settings = packed_as(source.settings, quant, double_quant)
        diagnosis = examine(
            source, settings, gpu=gpu, rank=rank, trust_remote_code=trust_remote_code
        )
    if as_json:
        render.print_json(diagnosis.as_dict())
    else:
        render_doctor.show(diagnosis, render.console(color.value))
    if not diagnosis.good:
        raise typer.Exit(HAS_PROBLEMS)
