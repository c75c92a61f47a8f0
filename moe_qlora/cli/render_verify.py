"""Print what `moe-qlora verify` found."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from ..checkpoint.verify import VerifyReport, WeightError
from ..layout import human_bytes, name_pattern
from .render import Column, FittedTable, say


def show(report: VerifyReport, out: Console) -> None:
    """Print whether the folder is whole, and the errors of packing where known."""
    if report.errors:
        _table(report).show(out)
    if not report.good:
        return
    what = "plain" if report.kind == "plain" else f"packed as {report.kind}"
    if report.method:
        what = f"quantized by its maker ({escape(report.method)})"
    files = f"{report.files} file{'' if report.files == 1 else 's'}"
    held = f"{report.tensors} tensors in {files}, {human_bytes(report.nbytes)}"
    more = f"; {report.experts} expert weights, {report.linears} Linear layers packed"
    if report.kind == "plain":
        codes = f"; {report.dequantized} weights are codes, and are read dequantized"
        more = codes if report.dequantized else ""
    say(out, f"[green]{escape(str(report.folder))} is whole[/]: {what}, {held}{more}.")


def _table(report: VerifyReport) -> FittedTable:
    title = f"{escape(str(report.folder))}: error of {report.kind}, relative (Frobenius)"
    columns = (
        Column("parameter", "name"),
        Column("count", "number", rank=3),
        Column("shape", rank=4),
        Column("error", "number"),
        Column("worst", "number"),
        Column("where", "name", rank=1),
        Column("largest difference", "number", rank=2),
    )
    rows = FittedTable(title, columns)
    for error in report.errors:
        if error.expert:
            rows.add_row(
                escape(error.name),
                "1",
                "x".join(map(str, error.shape)),
                f"{error.relative:.2%}",
                f"{error.experts[error.worst]:.2%}",
                f"expert {error.worst}",
                f"{error.max_abs:.3g}",
            )
    rows.add_section()
    linears: dict[str, list[WeightError]] = {}
    for error in report.errors:
        if not error.expert:
            linears.setdefault(name_pattern(error.name), []).append(error)
    for pattern, errors in linears.items():
        worst = max(errors, key=lambda error: error.relative)
        shapes = {"x".join(map(str, error.shape)) for error in errors}
        rows.add_row(
            escape(pattern),
            str(len(errors)),
            shapes.pop() if len(shapes) == 1 else "various",
            f"{sum(error.relative for error in errors) / len(errors):.2%}",
            f"{worst.relative:.2%}",
            escape(worst.name),
            f"{max(error.max_abs for error in errors):.3g}",
        )
    return rows
