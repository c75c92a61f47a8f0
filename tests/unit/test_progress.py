"""Progress is told to a caller's function, or to nobody."""

from __future__ import annotations

from moe_qlora.progress import reporting


def test_a_caller_is_told_and_nobody_is_not():
    calls = []
    with reporting(lambda *state: calls.append(state), "doing", "done") as tell:
        tell(1, 2, "a")
    assert calls == [(1, 2, "a")]
    for nothing in (None, False):
        with reporting(nothing, "doing", "done") as tell:
            tell(1, 2, "a")
