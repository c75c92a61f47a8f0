"""How sizes and lists of names are written."""

from __future__ import annotations

import pytest

from moe_qlora.layout import human_bytes, listed


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98304, "96.0 KiB"),
        (18 << 30, "18.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes(count, text):
    assert human_bytes(count) == text


def test_lists():
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, separator="; ") == "a and 1 more"
    assert listed([]) == ""
