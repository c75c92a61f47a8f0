"""A report as one HTML page: the values for the templates in this folder.

Sentences and numbers are made here, markup in the templates. Text from a checkpoint's files is
escaped by the templates, and characters that only reorder or hide text are made visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jinja2
from markupsafe import Markup

from ..errors import visible
from ..layout import human_bytes, listed
from . import charts
from .charts import Bar, HeatMap, LineChart, Shade, StackedChart
from .measure import layer_label
from .pieces import (
    ErrorPiece,
    LayoutPiece,
    LoraPiece,
    MemoryPiece,
    Missing,
    Report,
    RoutingPiece,
    TrainingPiece,
)

_SHADES = 7
_USE_BOUNDS = (1e-12, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_USE = (
    Shade("u0", "none", ""),
    Shade("u1", "0", "0.25"),
    Shade("u2", "0.25", "0.5"),
    Shade("u3", "0.5", "0.8"),
    Shade("u4", "0.8", "1.25"),
    Shade("u5", "1.25", "2"),
    Shade("u6", "2", "4"),
    Shade("u7", "4+", ""),
)
# Layers of the chart from the bottom up: name, colour, components of a plan
_MEMORY: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "weights",
        "c0",
        ("packed experts", "packed Linear layers", "other weights", "quantization statistics"),
    ),
    ("library workspace", "c6", ("library workspace",)),
    (
        "adapters and optimizer",
        "c1",
        ("adapters", "optimizer states", "gradients", "gradient buckets", "optimizer step"),
    ),
    ("kept activations", "c2", ("kept activations",)),
    ("layer at work", "c3", ("layer at work", "decode scratch", "gathered weights")),
    ("logits and loss", "c4", ("logits and loss",)),
)
_TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Norm of the gradient",
    "mean_token_accuracy": "Token accuracy",
}
_FEW = 20  # assignments for each expert; with fewer, one may have none by chance
_FROM_ZERO = ("learning_rate", "grad_norm")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number at the top of the page."""

    name: str
    value: str
    more: str


def render(report: Report) -> str:
    """Return the page."""
    sections = {
        "layout": _section(report.layout, _layout),
        "bytes": _section(report.layout, _bytes),
        "error": _section(report.error, _error),
        "routing": _section(report.routing, _routing),
        "lora": _section(report.lora, _lora),
        "memory": _section(report.memory, _memory),
        "training": _section(report.training, _training),
    }
    template = _environment().get_template("page.html")
    return template.render(report=report, figures=list(_figures(report)), **sections)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moe_qlora.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(
        bytes=human_bytes, count=_count, many=_many, percent=_percent, breaks=_breaks
    )
    return environment


def _shown(value: Any) -> Any:
    """Make hidden characters of plain text visible; markup of the templates stays."""
    return visible(value, keep="\n") if isinstance(value, str) and type(value) is str else value


def _breaks(name: str) -> Markup:
    """Return a dotted name with possible line breaks after dots and underscores."""
    text = str(Markup.escape(visible(name)))
    return Markup(text.replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _section(piece: Any, view: Any) -> Any:
    """Return the values of a section: the view of its piece, or the reason why it is missing."""
    if isinstance(piece, Missing):
        return {"missing": piece.why, "fault": piece.fault}
    return {"missing": "", **view(piece)}


def _figures(report: Report) -> Any:
    """Yield the numbers at the top, from the pieces that were measured."""
    layout, memory, lora = report.layout, report.memory, report.lora
    if isinstance(layout, LayoutPiece):
        more = f"from {human_bytes(layout.before)}" if layout.packed else "not packed"
        name = "Weights, packed" if layout.packed else "Weights"
        yield Figure(name, human_bytes(layout.after), more)
        if layout.experts:
            counts = " or ".join(map(str, layout.experts))
            top = f", {layout.top_k} for a token" if layout.top_k else ""
            yield Figure(
                "Experts", f"{layout.layers} \u00d7 {counts}", f"layers \u00d7 experts{top}"
            )
    if isinstance(report.error, ErrorPiece) and report.error.maps:
        values = [v for one in report.error.maps for row in one.errors for v in row]
        yield Figure("Mean error", _percent(_mean(values)), f"of experts in {report.error.kind}")
    if isinstance(report.routing, RoutingPiece):
        dead = sum(len(layer.dead) for layer in report.routing.layers)
        balance = _mean([layer.balance for layer in report.routing.layers])
        yield Figure(
            "Routing balance", f"{balance:.2f}", f"1 is even; {_many(dead, 'dead expert')}"
        )
    if isinstance(lora, LoraPiece):
        share = f"{100 * lora.trained / max(lora.total, 1):.2g} % of the model"
        yield Figure("Trained weights", _count(lora.trained), share)
    if isinstance(memory, MemoryPiece):
        settings = memory.plan.settings
        step = f"{settings.batch} \u00d7 {settings.seq:,} tokens"
        yield Figure("Peak of a step", human_bytes(memory.plan.peak.nbytes), step)
    if isinstance(report.training, TrainingPiece):
        loss = report.training.curve("loss") or report.training.curve("eval_loss")
        if loss is not None and loss.points:
            first, last = loss.points[0][1], loss.points[-1][1]
            yield Figure("Loss", f"{last:.3f}", f"from {first:.3f}")


def _layout(piece: LayoutPiece) -> dict[str, Any]:
    return {"piece": piece}


def _bytes(piece: LayoutPiece) -> dict[str, Any]:
    before = [(kind.kind, float(kind.before)) for kind in piece.kinds]
    after = [(kind.kind, float(kind.codes)) for kind in piece.kinds]
    statistics = float(sum(kind.statistics for kind in piece.kinds))
    if statistics:
        after.append(("statistics", statistics))
    bars: tuple[Bar, ...] = charts.stacked_bars(
        [("as loaded", before), (f"packed, {piece.packed or 'nothing'}", after)]
    )
    return {
        "piece": piece,
        "bars": bars,
        "names": list(dict.fromkeys([*dict(before), *dict(after)])),
    }


def _error(piece: ErrorPiece) -> dict[str, Any]:
    every = [value for one in piece.maps for row in one.errors for value in row]
    ends = charts.even_steps(every, _SHADES)
    bounds = ends[1:-1]
    legend = [Shade(f"s{n}", *pair) for n, pair in enumerate(pairwise(_unlike(ends)))]
    maps = []
    for one in piece.maps:
        chart: HeatMap = charts.heat_map(
            one.errors, one.layers, bounds, legend, lambda v: _percent(v, bare=True)
        )
        rows: list[dict[str, Any]] = [
            {
                "layer": layer,
                "mean": _mean(errors),
                "least": min(errors),
                "most": max(errors),
                "worst": errors.index(max(errors)),
            }
            for layer, errors in zip(one.layers, one.errors, strict=True)
        ]
        worst = max(rows, key=lambda row: row["most"])
        maps.append({"pattern": one.pattern, "chart": chart, "rows": rows, "worst": worst})
    return {"piece": piece, "maps": maps, "legend": legend, "mean": _mean(every)}


def _routing(piece: RoutingPiece) -> dict[str, Any]:
    layers = piece.layers
    groups: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(len(layer.counts), []).append(index)
    labels = [layer_label(layer.name) for layer in layers]
    maps = [
        charts.heat_map(
            [layers[index].relative for index in members],
            [labels[index] for index in members],
            _USE_BOUNDS,
            _USE,
            lambda value: f"{value:.1f}",
        )
        for members in groups.values()
    ]
    rows: list[dict[str, Any]] = [
        {
            "layer": label,
            "balance": layer.balance,
            "dead": _experts(layer.dead),
            "dead_count": len(layer.dead),
            "hot": _hot(layer.hot, layer.relative),
            "quarter": layer.top_quarter,
            "height": round(100 * layer.balance, 2),
        }
        for label, layer in zip(labels, layers, strict=True)
    ]
    least = min(rows, key=lambda row: row["balance"])
    return {
        "piece": piece,
        "maps": maps,
        "legend": _USE,
        "rows": rows,
        "least": least,
        "balance": _mean([layer.balance for layer in layers]),
        "quarter": _mean([layer.top_quarter for layer in layers]),
        "dead": sum(len(layer.dead) for layer in layers),
        "hot": sum(len(layer.hot) for layer in layers),
        "experts": sum(len(layer.counts) for layer in layers),
        "few": any(layer.total < _FEW * len(layer.counts) for layer in layers),
    }


def _experts(numbers: Sequence[int]) -> str:
    return listed([str(number) for number in numbers], 8) or "none"


def _hot(numbers: Sequence[int], relative: Sequence[float]) -> str:
    return listed([f"{n} ({relative[n]:.1f}\u00d7)" for n in numbers], 5) or "none"


def _lora(piece: LoraPiece) -> dict[str, Any]:
    covered = [group for group in piece.groups if group.covered]
    return {
        "piece": piece,
        "experts": sum(group.covered for group in covered if group.expert),
        "modules": sum(group.covered for group in covered if not group.expert),
        "all_experts": sum(group.count for group in piece.groups if group.expert),
    }


def _memory(piece: MemoryPiece) -> dict[str, Any]:
    plan, moments = piece.plan, piece.moments
    peak = max(moment.nbytes for moment in moments)
    unit, size = next((u, s) for u, s in _UNITS if peak >= 2 * s or s == 1)
    columns = [
        [sum(moment.parts.get(p, 0) for p in parts) / size for _, _, parts in _MEMORY]
        for moment in moments
    ]
    shown = [n for n in range(len(_MEMORY)) if any(column[n] for column in columns)]
    names = [_MEMORY[n][0] for n in shown]
    chart: StackedChart = charts.stacked_chart(
        names, [[column[n] for n in shown] for column in columns], _tick
    )
    phases = []
    for phase in ("forward", "backward", "optimizer's step"):
        places = [n for n, moment in enumerate(moments) if moment.phase == phase]
        if places:
            start = round(100 * places[0] / len(moments), 2)
            phases.append({"name": phase.removesuffix("'s step"), "start": start})
    rows = [{"name": n, "most": most, "peak": at} for n, most, at in plan.rows()]
    return {
        "plan": plan,
        "chart": chart,
        "names": names,
        "colors": [_MEMORY[n][1] for n in shown],
        "unit": unit,
        "phases": phases,
        "rows": rows,
        "peak": peak,
        "length": piece.length,
    }


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def _training(piece: TrainingPiece) -> dict[str, Any]:
    panels = []
    for name in dict.fromkeys(curve.name.removeprefix("eval_") for curve in piece.curves):
        both = {"training": piece.curve(name), "evaluation": piece.curve(f"eval_{name}")}
        curves = [(kind, curve.points) for kind, curve in both.items() if curve and curve.points]
        if not curves:
            continue
        title = _TITLES.get(name, name)
        chart: LineChart = charts.line_chart(
            curves,
            _tick,
            lambda value, step: f"{value:,.0f}" if step >= 1 else _tick(value, step),
            zero=name in _FROM_ZERO,
        )
        rows = [
            {
                "name": kind,
                "first": _value(points[0][1]),
                "last": _value(points[-1][1]),
                "least": _value(min(y for _, y in points)),
                "most": _value(max(y for _, y in points)),
            }
            for kind, points in curves
        ]
        panels.append({"title": title, "chart": chart, "rows": rows})
    lost = sorted({step for curve in piece.curves for step in curve.lost})
    return {
        "piece": piece,
        "panels": panels,
        "lost": [f"{step:.0f}" for step in lost],
        "epochs": "1 epoch" if f"{piece.epochs:.3g}" == "1" else f"{piece.epochs:.3g} epochs",
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _percent(value: float, *, bare: bool = False) -> str:
    if not math.isfinite(value):
        return "over all bounds"
    digits = 1 if value >= 0.01 or value == 0 else 3
    return f"{100 * value:.{digits}f}" + ("" if bare else " %")


def _unlike(values: Sequence[float]) -> list[str]:
    """Return values in percent, with enough digits to differ."""
    return next(
        (
            written
            for digits in range(1, 12)
            if len(set(written := [f"{100 * value:.{digits}f}" for value in values])) == len(values)
        ),
        [f"{100 * value:.2e}" for value in values],
    )


def _tick(value: float, step: float) -> str:
    """Format a tick, with digits according to the distance of ticks."""
    if abs(value) < step / 1000:
        return "0"
    if step < 1e-3 or abs(value) >= 1e6:
        return _scientific(value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


def _value(value: float) -> str:
    return _scientific(value) if value and abs(value) < 1e-3 else f"{value:,.4g}"


def _scientific(value: float) -> str:
    """Return "1.5e-4"; three digits at most."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _count(number: int) -> str:
    """Return a number of weights in words: 30.5 billion."""
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return f"{number:,}"


def _many(number: int, noun: str) -> str:
    """Return a number with its noun: "1 layer", "3 layers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
