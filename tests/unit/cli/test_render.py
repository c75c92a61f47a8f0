"""Tables that fit, sentences that are wrapped, and the spinner."""

from __future__ import annotations

import io
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from moe_qlora.cli import render
from moe_qlora.cli.render import Column, FittedTable

NAME = "model.language_model.layers.*.mlp.experts.gate_up_proj"
WORDS = "one sentence that is wrapped at spaces and nowhere/else/not/even/in/paths"


def drawn(width: int, encoding: str = "utf-8") -> list[str]:
    columns = (
        Column("name", "name"),
        Column("count", "number", rank=1),
        Column("shape", rank=2),
        Column("why", "prose", rank=3),
    )
    table = FittedTable("The title", columns)
    table.add_row(NAME, "24", "128x1536x2048", WORDS)
    table.add_row("short", "1,024", "[bold]4x4[/]", "no")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    table.show(Console(file=stream, width=width, highlight=False))
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [30, 45, 60, 80, 120, 200])
def test_nothing_is_wider_than_the_console_but_what_must_be(width):
    lines = drawn(width)
    least = 26  # of the name, which is never left out
    assert max(map(len, lines)) <= max(width, least)
    row = next(line for line in lines if "gate_up_proj" in line)
    assert row.split()[0] == NAME or row.split()[0].count("\u2026") == 1
    assert row.split()[0].endswith("gate_up_proj")
    text = " ".join(lines)
    hidden = [name for name in ("count", "shape", "why") if name not in lines[1]]
    # The highest rank first; and what has no room is named.
    assert hidden == ["count", "shape", "why"][3 - len(hidden) :]
    assert ("no room for" in text) == bool(hidden)
    if "why" not in hidden:
        assert "nowhere/else/not/even/in/paths" in text


def test_all_of_it_where_there_is_room():
    lines = drawn(200)
    assert lines[0] == "The title"
    assert lines[1].split() == ["name", "count", "shape", "why"]
    assert set(lines[2]) == {"\u2500"}
    assert lines[3].split("  ")[0] == NAME
    assert WORDS in lines[3]
    count = lines[1].index("count") + len("count")
    assert lines[3][:count].endswith("   24") and lines[4][:count].endswith("1,024")


def test_a_terminal_without_unicode():
    assert NAME[-12:] in " ".join(drawn(45, "ascii"))
    assert "..." in " ".join(drawn(45, "ascii"))


@pytest.mark.parametrize("width", [1, 5, 10, 53, 54, 100])
def test_elided(width):
    short = render.elided(NAME, width)
    assert len(short) <= max(width, 3)
    assert short == NAME if width >= len(NAME) else "\u2026" in short
    assert NAME.startswith(short.partition("\u2026")[0])


@pytest.mark.parametrize("width", [6, 7, 20, 43, 44, 45])
def test_elided_counts_columns(width):
    """A Chinese character takes two."""
    name = "\u6a21\u578b" * 20 + ".mlp"
    short = render.elided(name, width)
    assert width - 1 <= cell_len(short) <= width
    assert short.endswith("mlp") and short.count("\u2026") == 1
    head, _, tail = short.partition("\u2026")
    assert name.startswith(head) and name.endswith(tail)


def test_sentences_are_wrapped_at_spaces():
    stream = io.StringIO()
    path = "/a/very/long/path/that/is/wider/than/the/console"
    render.say(Console(file=stream, width=20, highlight=False), f"[red]There is[/] {path} in it.")
    assert stream.getvalue().splitlines() == ["There is", path, "in it."]


@pytest.mark.parametrize("columns", ["60", "200", None])
def test_columns_are_honoured_in_pipes(monkeypatch, columns):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    assert render.console("auto").width == int(columns or 160)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_spinner_on_terminals_only(monkeypatch):
    for stream, quiet, shown in ((Terminal(), False, True), (Terminal(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(KeyboardInterrupt), render.working("Reading [it]", quiet=quiet):
            raise KeyboardInterrupt
        assert ("Reading [it]" in stream.getvalue()) == shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with render.working("Reading"):
        pass
    assert sys.stderr.getvalue() == ""
