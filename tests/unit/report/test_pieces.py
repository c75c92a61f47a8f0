"""What the records compute, by hand and against slow sums."""

from __future__ import annotations

import math
import random

import pytest

from moe_qlora.report import charts, page
from moe_qlora.report.pieces import LayerUse


def test_balance_is_the_entropy_over_that_of_even_use():
    assert LayerUse("", (5, 5, 5, 5)).balance == pytest.approx(1.0)
    assert f"{LayerUse('', (20, 0, 0, 0)).balance:.3f}" == "0.000"
    assert LayerUse("", (1, 1, 0, 0)).balance == pytest.approx(0.5)  # ln 2 / ln 4
    counts = (7, 1, 0, 12, 3, 30)
    slow = 0.0
    for count in counts:
        if count:
            slow -= count / 53 * math.log(count / 53, 6)
    assert LayerUse("", counts).balance == pytest.approx(slow)


def test_dead_and_hot_experts():
    layer = LayerUse("", (0, 10, 3, 40, 0, 7, 0, 20))  # even: 10
    assert layer.dead == (0, 4, 6)
    assert layer.hot == (3, 7)  # at least 20, the busiest first
    assert layer.relative[3] == 4.0
    assert layer.top_quarter == 60 / 80
    assert LayerUse("", (0, 0)).hot == ()


def cells_of(path: str) -> set[tuple[int, int]]:
    """The cells that a path of rectangles covers, one by one."""
    covered = set()
    for part in path.split("M")[1:]:
        x, rest = part.split(" ", 1)
        y, run = rest.split("h", 1)
        width = int(run.split("v")[0])
        assert run == f"{width}v1h-{width}z"
        new = {(int(x) + n, int(y)) for n in range(width)}
        assert not new & covered
        covered |= new
    return covered


@pytest.mark.parametrize("size", [(1, 1), (3, 17), (48, 128)])
def test_a_heat_map_shades_each_cell_by_its_value(size):
    rows, columns = size
    draw = random.Random(0)
    grid = [[draw.random() for _ in range(columns)] for _ in range(rows)]
    bounds = charts.even_steps([value for row in grid for value in row], 4)[1:-1]
    legend = [charts.Shade(f"s{n}", "", "") for n in range(4)]
    chart = charts.heat_map(grid, [str(n) for n in range(rows)], bounds, legend, str)
    covered = {name: cells_of(path) for name, path in chart.paths}
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            index = sum(bound <= value for bound in bounds)
            assert (x, y) in covered[f"s{index}"]
    assert sum(map(len, covered.values())) == rows * columns
    assert len(chart.x_ticks) <= 12 and len(chart.y_ticks) <= 12
    assert chart.y_ticks[0].at == pytest.approx(50 / rows, abs=1e-3)


def test_infinite_errors_have_the_last_shade():
    bounds = charts.even_steps([1.0, math.inf, 3.0], 2)[1:-1]
    assert bounds == [2.0]
    legend = [charts.Shade("low", "", ""), charts.Shade("high", "", "")]
    chart = charts.heat_map([[1.0, math.inf]], ["0"], bounds, legend, str)
    assert dict(chart.paths) == {"low": "M0 0h1v1h-1z", "high": "M1 0h1v1h-1z"}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 7.3, (0, 8, 2)),
        (5.447, 5.743, (5.4, 5.8, 0.1)),
        (3, 3, (2.6, 3.4, 0.2)),
        (0, 0, (0, 1, 0.5)),
        (1, math.nextafter(1, 0), (0.9, 1.1, 0.05)),  # in any order
        (-3, math.nextafter(-3, 0), (-3.4, -2.6, 0.2)),
        (5e-324, 1e-320, (0, 1, 0.5)),
    ],
)
def test_ranges_of_axes(low, high, expected):
    assert charts.nice_range(low, high) == pytest.approx(expected)


def test_a_line_goes_through_its_points():
    chart = charts.line_chart(
        [("a", [(0, 0.0), (5, 10.0), (10, 5.0)])],
        lambda y, step: f"{y:g}",
        lambda x, step: f"{x:g}",
    )
    assert chart.lines[0].path == "M0.00 100.00L50.00 0.00L100.00 50.00"
    assert {tick.label: tick.at for tick in chart.y_ticks} == {"0": 100, "5": 50, "10": 0}
    assert chart.x_ticks[0] == charts.Tick(0, "0")
    alone = charts.line_chart([("a", [(7, 2.0)])], lambda y, step: "", lambda x, step: "")
    assert alone.lines[0].path.count("L") == 1  # a dot, with round ends
    assert alone.lines[0].path.startswith("M50.00 ") and alone.x_ticks[0].at == 50


@pytest.mark.parametrize("zero", [False, True])
def test_any_two_values_are_drawn_within_the_plot(zero):
    draw = random.Random(0)
    ends = [1.0, 0.3, 0.95, 0.0, -2.0, 5e-324, 1e-301, 3e-300, 1e15, *map(float, range(1, 9))]
    ends += [draw.uniform(-1, 1) * 10 ** draw.uniform(-8, 14) for _ in range(300)]
    for value in ends:
        for away in (math.nextafter(value, math.inf), math.nextafter(value, -math.inf), 0.0):
            points = [(1.0, value), (2.0, away)]
            turned = [(y, x) for x, y in sorted(points, key=lambda point: point[1])]
            for shown in (points, turned):
                chart = charts.line_chart(
                    [("a", shown)], lambda y, step: f"{y}", lambda x, step: f"{x}", zero=zero
                )
                marks = chart.lines[0].path[1:].replace("L", " ").split(" ")
                places = [float(mark) for mark in marks]
                places += [tick.at for tick in (*chart.x_ticks, *chart.y_ticks)]
                assert all(-0.1 <= place <= 100.1 for place in places), shown


def test_thinning_keeps_ends_and_spikes():
    points = [(float(n), math.sin(n / 500)) for n in range(30_000)]
    points[12_345] = (12_345.0, 99.0)
    points[20_001] = (20_001.0, -99.0)
    thin = charts.thinned(points)
    assert len(thin) <= 602
    assert thin == sorted(thin)
    assert thin[0] == points[0] and thin[-1] == points[-1]
    assert {points[12_345], points[20_001]} <= set(thin) <= set(points)
    assert charts.thinned(points[:600]) == points[:600]


def test_stacked_areas_lie_on_each_other():
    chart = charts.stacked_chart(["a", "b"], [[1, 1], [2, 2]], lambda y, step: f"{y:g}")
    assert chart.areas[0].path == (
        "M0.00 75.00L50.00 75.00L50.00 50.00L100.00 50.00"
        "L100.00 100.00L50.00 100.00L50.00 100.00L0.00 100.00Z"
    )
    assert chart.areas[1].path.startswith("M0.00 50.00L50.00 50.00L50.00 0.00L100.00 0.00")
    assert chart.peak == 75.0


def test_bars_share_a_scale_and_colours():
    before, after = charts.stacked_bars([("x", [("a", 6.0), ("b", 2.0)]), ("y", [("b", 2.0)])])
    assert [(s.start, s.width) for s in before.segments] == [(0, 75), (75, 25)]
    assert [(s.start, s.width, s.index) for s in after.segments] == [(0, 25, 1)]


def test_a_small_difference_looks_small():
    """Heights are percent of the plot; 0.2 % must not fill it, and ticks say different things."""

    def heights(*values):
        chart = charts.line_chart([("a", list(enumerate(values)))], page._tick, page._tick)
        ticks = [tick.label for tick in chart.y_ticks]
        assert len(set(ticks)) == len(ticks)
        return [float(point.split()[1]) for point in chart.lines[0].path[1:].split("L")]

    high, low = heights(1.0, 1.002)
    assert 0.5 < abs(high - low) < 5
    high, low = heights(2.0, 1.0)
    assert abs(high - low) > 80


@pytest.mark.parametrize("values", [(0.0884, 0.0886), (0.05, 0.2), (0.09, 0.09), (0.0, 0.0)])
def test_a_scale_of_errors_repeats_no_label_and_makes_nothing_of_little(values):
    ends = charts.even_steps(values, 7)
    labels = page._unlike(ends)
    assert len(set(labels)) == len(labels) == 8
    assert ends[0] <= min(values) and ends[-1] >= max(values)
    shades = [sum(bound <= value for bound in ends[1:-1]) for value in values]
    assert (abs(shades[0] - shades[1]) <= 1) == (values != (0.05, 0.2))
