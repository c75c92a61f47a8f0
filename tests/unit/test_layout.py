"""How sizes, lists of names and progress are told."""

from __future__ import annotations

from moe_qlora.layout import human_bytes, listed
from moe_qlora.progress import reporting


def test_bytes_and_lists():
    texts = ["0 B", "1023 B", "1.0 KiB", "96.0 KiB", "18.0 GiB", "3.0 TiB"]
    assert [*map(human_bytes, (0, 1023, 1024, 98304, 18 << 30, 3 << 40))] == texts
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, separator="; ") == "a and 1 more"
    assert listed([]) == ""


def test_progress_is_told_to_a_caller_or_nobody():
    calls = []
    for progress in (lambda *state: calls.append(state), None, False):
        with reporting(progress, "doing", "done") as tell:
            tell(1, 2, "a")
    assert calls == [(1, 2, "a")]
