"""Tables that fit, sentences that are wrapped, and the spinner."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moe_qlora.cli import render

NAME = "model.language_model.layers.*.mlp.experts.gate_up_proj"
WORDS = "one sentence that is wrapped at spaces, not/in/paths"


def drawn(width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    out = Console(file=stream, width=width, highlight=False)
    rows = [(NAME, "24", "128x1536x2048", WORDS), None, ("short", "1,024", "4x4", "no")]
    render.show_table(out, "The title", ("name", ">count", "shape", "why"), rows)
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_fits_and_nothing_is_cut_off(width):
    lines = drawn(width)
    assert lines[0] == "The title" and max(map(len, lines)) <= width
    assert set(lines[2]) == {"\u2500"}
    first = lines[3 : lines.index(lines[2], 3)]
    _, count, shape, why = (lines[1].index(each) for each in ("name", "count", "shape", "why"))
    places = ((0, count), (count, shape), (shape, why), (why, width))
    columns = ["".join(line[a:b].strip() for line in first) for a, b in places]
    wanted = [NAME, "24", "128x1536x2048", WORDS.replace(" ", "")]
    assert [column.replace(" ", "") for column in columns] == wanted
    assert lines[-2][: shape - 2].endswith("1,024")  # numbers to the right
    assert len(first) == 1 if width == 200 else len(first) > 1
