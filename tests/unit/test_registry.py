"""The registry's reader: data, errors, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_qlora import registry
from moe_qlora.errors import CheckpointError


def test_each_file_loads():
    for model_type in registry.model_types():
        entry = registry.load(model_type)
        assert (entry.model_type, bool(entry.experts)) == (model_type, True)
        assert all(item["checkpoint"]["keys"] for item in entry.experts), model_type


def test_reading_imports_no_torch():
    code = (
        "import sys; from moe_qlora import registry; registry.load('qwen3_moe');"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_type():
    with pytest.raises(CheckpointError, match="'llama' is not in the registry"):
        registry.load("llama")
    with pytest.raises(CheckpointError, match="not in the registry"):
        registry.load("../pyproject")


def test_entries_do_not_leak_into_each_other():
    from moe_qlora.testing import tiny_config

    config = tiny_config("qwen4_exp", text_config={"num_experts": 6})
    assert config.text_config.num_experts == 6
    assert config.text_config.hidden_size == 64
    assert tiny_config("qwen4_exp").text_config.num_experts == 4
