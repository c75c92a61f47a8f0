"""Configurations: JSON that somebody else wrote, and models by name or in memory."""

import json

import pytest
from transformers import BitsAndBytesConfig

from moe_qlora.errors import CheckpointError
from moe_qlora.models import named
from moe_qlora.models.files import read_json
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_config


def test_reads_what_json_writes(tmp_path):
    file = tmp_path / "config.json"
    value = {"a": [10**19, -2.5, None, {"b": "\xe9\u2028\U0001f600"}], "deep": "[" * 60 + "]" * 60}
    for ascii_only in (True, False):
        file.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8")
        assert read_json(file) == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing: copy the whole folder"),
        (b"", "is no valid JSON"),
        (b"[1]", "holds list and no JSON object"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b'{"a": ' + b"1" * 21 + b"}", "an integer has 21 digits"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 levels deep"),
        (b'{"a": ' + b"[" * 10**5, "is no valid JSON"),
        (b'{"a": "\xff"}', "is no valid JSON"),
        (b'{"a": "\\ud800"}', "is no valid JSON"),
        (b"{}" + b" " * 300_000, "longer than 200000 bytes"),
    ],
)
def test_refuses_the_rest(tmp_path, content, reason):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_json(file, 200_000)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_live_configuration_says_how_it_is_packed(bits):
    """Loaded models hold the object that they were loaded with, files its dict."""
    asked = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype="float16")
    of_file = tiny_config("qwen3_moe", quantization_config=asked.to_dict())
    of_model = tiny_config("qwen3_moe")
    of_model.quantization_config = asked
    for config in (of_file, of_model):
        assert named.resolve(config).settings == CodecSettings.from_config(asked)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
@pytest.mark.parametrize("part", [0, []])
def test_a_part_that_is_no_configuration_is_named(tmp_path, family, part):
    content = {"model_type": family, "text_config": part}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="text_config"):
        named.resolve(tmp_path)
