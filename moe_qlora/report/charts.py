"""Geometry of a report's charts: positions in percent, SVG paths and axis labels.

Plots are drawn in a box of 100 x 100, which the page stretches to its width, without its strokes
and labels.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_MOST_POINTS = 600  # of a curve; more would not be visible
_LEAST = 1e-300  # Values below are 0 to a chart: steps between ticks could not be computed
_CELLS_WITH_NUMBERS = 16  # Most columns of a heat map with numbers in its cells


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis."""

    at: float  # Percent of the plot's width from the left, or height from the top
    label: str


@dataclass(frozen=True, slots=True)
class Shade:
    """One step of a heat map's scale."""

    name: str  # Of the CSS class
    start: str  # Where its range starts
    rest: str  # Where it ends


@dataclass(frozen=True, slots=True)
class Cell:
    """The number in a cell of a small heat map, at its middle."""

    x: float
    y: float
    label: str
    shade: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Layers down, experts across."""

    rows: int
    columns: int
    paths: tuple[tuple[str, str], ...]  # Shade and SVG path, a unit for each cell
    cells: tuple[Cell, ...]  # Empty where there are too many to read
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    legend: tuple[Shade, ...]

    @property
    def height(self) -> int:
        """Height of the plot in pixels."""
        each = 30 if self.cells else max(4, min(20, 420 // max(self.rows, 1)))
        return each * self.rows


def heat_map(
    grid: Sequence[Sequence[float]],
    layers: Sequence[str],
    bounds: Sequence[float],
    legend: Sequence[Shade],
    number: Callable[[float], str],
) -> HeatMap:
    """Draw a grid; a value's shade is the first with an upper bound (of `bounds`) above it."""
    columns = max(map(len, grid), default=0)
    paths: dict[str, list[str]] = {}
    cells = []
    for y, row in enumerate(grid):
        start = 0
        shades = [legend[bisect_right(bounds, value)].name for value in row]
        while start < len(row):
            stop = start + 1
            while stop < len(row) and shades[stop] == shades[start]:
                stop += 1
            width = stop - start
            paths.setdefault(shades[start], []).append(f"M{start} {y}h{width}v1h-{width}z")
            start = stop
        for x, value in enumerate(row):
            left, top = 100 * (x + 0.5) / columns, 100 * (y + 0.5) / len(grid)
            cells.append(Cell(round(left, 3), round(top, 3), number(value), shades[x]))
    return HeatMap(
        rows=len(grid),
        columns=columns,
        paths=tuple((name, "".join(parts)) for name, parts in paths.items()),
        cells=tuple(cells) if columns <= _CELLS_WITH_NUMBERS and len(grid) <= 30 else (),
        x_ticks=_places([str(expert) for expert in range(columns)], 12),
        y_ticks=_places(layers, 12),
        legend=tuple(legend),
    )


def _places(labels: Sequence[str], most: int) -> tuple[Tick, ...]:
    """Return at most this many labels, evenly chosen, at the middles of their places."""
    step = next(
        s * 10**e for e in range(9) for s in (1, 2, 4, 5) if len(labels) <= most * s * 10**e
    )
    count = len(labels)
    return tuple(
        Tick(round(100 * (index + 0.5) / count, 3), labels[index])
        for index in range(0, count, step)
    )


def even_steps(values: Iterable[float], steps: int) -> list[float]:
    """Return the `steps` + 1 ends of even steps over the finite values.

    The range is at least a tenth of the largest value, so that almost equal values look equal.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = _widened(min(finite, default=0.0), max(finite, default=0.0))
    if _alike(low, high):
        high = low + 0.01
    return [low + (high - low) * index / steps for index in range(steps + 1)]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart."""

    name: str
    path: str
    last: float  # Its last value


@dataclass(frozen=True, slots=True)
class LineChart:
    """Curves over steps."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def line_chart(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    number: Callable[[float, float], str],
    x_number: Callable[[float, float], str],
    *,
    zero: bool = False,
) -> LineChart:
    """Draw curves of (x, y) over common axes; with `zero` the y axis includes 0.

    `number` and `x_number` format a tick, given its value and the distance of ticks.
    """
    xs = [x for _, points in curves for x, _ in points]
    ys = [y for _, points in curves for _, y in points] + [0.0] * zero
    x_low, x_high = min(xs), max(xs)
    low, high, y_step = nice_range(*_widened(min(ys), max(ys)))
    alone = _alike(x_low, x_high)
    height = high - low

    def left(x: float) -> float:
        return 50.0 if alone else 100 * (x - x_low) / (x_high - x_low)

    def place(x: float, y: float) -> str:
        return f"{left(x):.2f} {100 - 100 * (y - low) / height:.2f}"

    lines = []
    for name, points in curves:
        shown = thinned(points)
        marks = [place(x, y) for x, y in shown]
        path = "M" + "L".join(marks if len(marks) > 1 else marks * 2)
        lines.append(Line(name, path, points[-1][1]))
    _, _, x_step = nice_range(x_low, x_high, 4)
    return LineChart(
        tuple(lines),
        tuple(
            Tick(round(left(x), 3), x_number(x, x_step)) for x in _multiples(x_low, x_high, x_step)
        ),
        tuple(
            Tick(round(100 - 100 * (y - low) / height, 3), number(y, y_step))
            for y in _multiples(low, high, y_step)
        ),
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve to the visible points: minimum and maximum of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = 2 * len(points) / _MOST_POINTS
    shown = [points[0]]
    for index in range(_MOST_POINTS // 2):
        part = points[int(index * size) : int((index + 1) * size)]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        shown += sorted(ends - {shown[-1]})
    return shown if shown[-1] == points[-1] else [*shown, points[-1]]


def nice_range(low: float, high: float, ticks: int = 4) -> tuple[float, float, float]:
    """Return a range around two values and the distance of its ticks: 1, 2 or 5 times 10**n."""
    if _alike(low, high):
        pad = max(abs(low), abs(high)) / 10
        if pad < _LEAST:
            low, high, pad = 0.0, 0.0, 1.0
        low, high = low - pad * (low != 0), high + pad
    rough = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def _widened(low: float, high: float) -> tuple[float, float]:
    """Widen a range to a tenth of its values at least, so that 0.2 % looks like 0.2 %."""
    lacking = max(abs(low), abs(high)) / 10 - (high - low)
    if lacking <= 0:
        return low, high
    return low - lacking / 2, high + lacking / 2


def _alike(low: float, high: float) -> bool:
    """True if two values are equal within rounding, or are both rounding errors."""
    size = max(abs(low), abs(high))
    return size < _LEAST or high - low <= 1e-12 * size


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Area:
    """One layer of a stacked chart."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class StackedChart:
    """Parts on top of each other, over places of the same width."""

    areas: tuple[Area, ...]
    y_ticks: tuple[Tick, ...]
    peak: float  # Where the sum is largest, in percent from the left


def stacked_chart(
    names: Sequence[str], columns: Sequence[Sequence[float]], number: Callable[[float, float], str]
) -> StackedChart:
    """Draw columns side by side; each has the values of `names` from the bottom up."""
    totals = [sum(column) for column in columns]
    _, high, step = nice_range(0.0, max(totals))
    width = 100 / len(columns)
    bottoms = [0.0] * len(columns)
    areas = []
    for index, name in enumerate(names):
        tops = [bottom + column[index] for bottom, column in zip(bottoms, columns, strict=True)]
        upper = [
            f"{x:.2f} {100 - 100 * top / high:.2f}"
            for place, top in enumerate(tops)
            for x in (place * width, (place + 1) * width)
        ]
        lower = [
            f"{x:.2f} {100 - 100 * bottom / high:.2f}"
            for place, bottom in reversed([*enumerate(bottoms)])
            for x in ((place + 1) * width, place * width)
        ]
        areas.append(Area(name, f"M{'L'.join([*upper, *lower])}Z"))
        bottoms = tops
    largest = totals.index(max(totals))
    return StackedChart(
        tuple(areas),
        tuple(
            Tick(round(100 - 100 * y / high, 3), number(y, step)) for y in _multiples(0, high, step)
        ),
        round((largest + 0.5) * width, 3),
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar, in percent of the longest bar."""

    name: str
    start: float
    width: float
    index: int  # Of its colour


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of several parts."""

    label: str
    total: float
    segments: tuple[Segment, ...]


def stacked_bars(bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> tuple[Bar, ...]:
    """Draw bars of named parts on one scale; equal names have equal colours."""
    longest = max(sum(size for _, size in parts) for _, parts in bars) or 1.0
    colors = {name: n for n, name in enumerate(dict.fromkeys(n for _, p in bars for n, _ in p))}
    drawn = []
    for label, parts in bars:
        start, segments = 0.0, []
        for name, size in parts:
            width = 100 * size / longest
            segments.append(Segment(name, round(start, 3), round(width, 3), colors[name]))
            start += width
        drawn.append(Bar(label, sum(size for _, size in parts), tuple(segments)))
    return tuple(drawn)
