"""How sizes and lists of names are written."""

from __future__ import annotations

from moe_qlora.layout import human_bytes, listed


def test_bytes():
    texts = ["0 B", "1023 B", "1.0 KiB", "96.0 KiB", "18.0 GiB", "3.0 TiB"]
    assert [*map(human_bytes, (0, 1023, 1024, 98304, 18 << 30, 3 << 40))] == texts


def test_lists():
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, separator="; ") == "a and 1 more"
    assert listed([]) == ""
