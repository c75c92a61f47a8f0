"""`moe-qlora doctor [MODEL]`: what runs fast here, what falls back and why, and what breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..layout import human_bytes
from . import render
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

if TYPE_CHECKING:
    from ..diagnosis.report import Diagnosis

HAS_PROBLEMS = 1
EXAMPLES = (
    "moe-qlora doctor",
    "moe-qlora doctor ./model",
    "moe-qlora doctor gpt-oss-20b --gpu 4090",
    "moe-qlora doctor ./model --json",
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
        typer.Option(help="LoRA rank on the experts; default: 16."),
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
    from ..models.files import place_of, refuse_yaml

    if model is not None:
        refuse_yaml(model, "doctor")
        place_of(model)
    with render.working(f"Examining {model or 'this environment'}"):
        from ..diagnosis.doctor import doctor as examine
        from ..models import named

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
        _show(diagnosis, render.console(color.value))
    if not diagnosis.good:
        raise typer.Exit(HAS_PROBLEMS)


_STATUS = {"tested": "green", "untested": "yellow", "too old": "red", "missing": "red"}


def _show(diagnosis: Diagnosis, out: Console) -> None:
    if diagnosis.fit:
        for line in diagnosis.fit.splitlines():
            if line.startswith("    "):
                render.paste(out, line.strip())
            else:
                render.say(out, escape(line))
        out.line()
    for note in diagnosis.notes:
        render.say(out, f"[yellow]note:[/] {escape(note)}")
    if diagnosis.notes:
        out.line()
    rows = [
        (
            row.name, escape(row.installed or "-"), row.tested,
            f"[{_STATUS[row.status]}]{row.status}[/]",
        )
        for row in diagnosis.packages
        if row.status != "not installed"
    ]  # fmt: skip
    render.show_table(out, "Versions", ("package", "installed", "tested with", ""), rows)
    headings = ("device", ">memory", "capability", "few tokens an expert", "many")
    devices = [
        (
            escape(device.name),
            "-" if device.nbytes is None else human_bytes(device.nbytes),
            device.capability or "-",
            device.few_tokens,
            device.many_tokens,
        )
        for device in diagnosis.devices
    ]
    render.show_table(out, "Devices, and their matrix products", headings, devices)
    if diagnosis.layers:
        _show_layers(diagnosis, out)
    colors = {"problem": "red", "warning": "yellow"}
    counts = dict.fromkeys(colors, 0)
    for finding in diagnosis.findings:
        counts[finding.severity] += 1
        mark = f"[{colors[finding.severity]}]{finding.severity}:[/]"
        render.say(out, f"{mark} {escape(finding.what)} {escape(finding.cure)}")
    if diagnosis.findings:
        out.line()
    problems, warnings = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items())
    render.say(out, f"[{'green' if diagnosis.good else 'red'}]{problems}[/], {warnings}.")


def _show_layers(diagnosis: Diagnosis, out: Console) -> None:
    label, device = escape(diagnosis.model), escape(diagnosis.device.name)
    rows = [
        (
            escape(layer.pattern),
            str(layer.count),
            escape(layer.class_name),
            f"[{'green' if layer.fast else 'yellow'}]{layer.backend}[/]",
            escape(layer.reason),
        )
        for layer in diagnosis.layers
    ]
    title = f"{label}: expert layers in training, on {device}"
    headings = ("experts", ">count", "class", "computed by", "why")
    render.show_table(out, title, headings, rows)
    costs = {layer.cost: layer.backend for layer in reversed(diagnosis.layers) if layer.cost}
    for cost, backend in reversed(costs.items()):
        render.say(out, f"{backend}: {escape(cost)}")
        out.line()
