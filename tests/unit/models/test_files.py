"""JSON that somebody else wrote: read as json does, or refused in a sentence with the file."""

from __future__ import annotations

import json

import pytest

from moe_qlora.errors import CheckpointError
from moe_qlora.models.files import read_json


def test_reads_what_json_writes(tmp_path):
    file = tmp_path / "config.json"
    value = {"a": [10**19, -2.5, None, {"b": "\xe9\u2028\U0001f600"}], "deep": "[" * 60 + "]" * 60}
    for ascii_only in (True, False):
        file.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
        assert read_json(file) == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1]", "holds list and no JSON object"),
        (b"{", "is no valid JSON"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b'{"a": ' + b"1" * 21 + b"}", "an integer has 21 digits"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels deep"),
        (b'{"a": ' + b"[" * 10**5, "is no valid JSON"),
        (b'{"a": "\xff"}', "is no valid JSON"),
        (b'{"a": "\\ud800"}', "is no valid JSON"),
    ],
)
def test_refuses_the_rest(tmp_path, content, reason):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_json(file)
    assert str(file) in str(error.value)


def test_a_file_that_is_too_long_or_is_missing(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="is missing: copy the whole folder"):
        read_json(file)
    file.write_bytes(b"{}" + b" " * 100)
    with pytest.raises(CheckpointError, match="longer than 101 bytes"):
        read_json(file, 101)
    with pytest.raises(CheckpointError, match="is no regular file"):
        read_json(tmp_path)
