"""Print a diagnosis as tables and sentences, for `moe-qlora doctor`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from ..diagnosis.report import PROBLEM, Diagnosis
from ..layout import human_bytes
from .render import Column, FittedTable, say

_STATUS = {"tested": "green", "untested": "yellow", "too old": "red", "missing": "red"}


def show(diagnosis: Diagnosis, out: Console) -> None:
    """Print versions, devices, the model's layers, and last what was found."""
    for note in diagnosis.notes:
        say(out, f"[yellow]note:[/] {escape(note)}")
    if diagnosis.notes:
        out.line()
    _packages(diagnosis, out)
    _devices(diagnosis, out)
    if diagnosis.layers:
        _layers(diagnosis, out)
    for finding in diagnosis.findings:
        color = "red" if finding.severity == PROBLEM else "yellow"
        say(out, f"[{color}]{finding.severity}:[/] {escape(finding.what)} {escape(finding.cure)}")
    if diagnosis.findings:
        out.line()
    problems = sum(finding.severity == PROBLEM for finding in diagnosis.findings)
    warnings = len(diagnosis.findings) - problems
    color = "red" if problems else "green"
    say(out, f"[{color}]{_count(problems, 'problem')}[/], {_count(warnings, 'warning')}.")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _packages(diagnosis: Diagnosis, out: Console) -> None:
    rows = FittedTable(
        "Versions",
        (Column("package"), Column("installed"), Column("tested with", rank=1), Column("")),
    )
    for row in diagnosis.packages:
        if row.status != "not installed":
            status = f"[{_STATUS[row.status]}]{row.status}[/]"
            rows.add_row(row.name, escape(row.installed or "-"), row.tested, status)
    rows.show(out)


def _devices(diagnosis: Diagnosis, out: Console) -> None:
    columns = (
        Column("device", "name"),
        Column("memory", "number", rank=2),
        Column("capability", rank=1),
        Column("few tokens an expert", "prose", rank=4),
        Column("many", "prose", rank=3),
    )
    rows = FittedTable("Devices, and what multiplies there", columns)
    for device in diagnosis.devices:
        rows.add_row(
            escape(device.name),
            "-" if device.nbytes is None else human_bytes(device.nbytes),
            device.capability or "-",
            device.few_tokens,
            device.many_tokens,
        )
    rows.show(out)


def _layers(diagnosis: Diagnosis, out: Console) -> None:
    columns = (
        Column("experts", "name"),
        Column("count", "number", rank=2),
        Column("class", rank=3),
        Column("computed by"),
        Column("why", "prose", rank=1),
    )
    label, device = escape(diagnosis.model), escape(diagnosis.device.name)
    rows = FittedTable(f"{label}: expert layers in training, on {device}", columns)
    for layer in diagnosis.layers:
        rows.add_row(
            escape(layer.pattern),
            str(layer.count),
            escape(layer.class_name),
            f"[{'green' if layer.fast else 'yellow'}]{layer.backend}[/]",
            escape(layer.reason),
        )
    rows.show(out)
    for cost in dict.fromkeys(layer.cost for layer in diagnosis.layers if layer.cost):
        backends = [layer.backend for layer in diagnosis.layers if layer.cost == cost]
        say(out, f"{backends[0]}: {escape(cost)}")
        out.line()
