"""What the tuner takes from its file, what it stores, and which results it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts import backend
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_model

triton = pytest.importorskip("triton")

from moe_qlora.kernels import autotune  # noqa: E402


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "kernels.json"
    monkeypatch.setattr(autotune, "cache_file", lambda device: path)
    autotune._load.cache_clear()
    yield path
    autotune._load.cache_clear()


def test_only_candidates_are_read(table):
    good = autotune._CANDIDATES[-1]
    rows = {
        "good": good,
        "none such": [64, 1, 4, 5, True, False],
        "nested": [good],
        "bools": [True],
        "text": "x",
    }
    table.parent.mkdir()
    table.write_text(json.dumps(rows), encoding="utf-8")
    assert autotune._load(0) == {"good": good}


@pytest.mark.parametrize("text", [None, "", "[1]", "\x00"])
def test_a_missing_or_broken_file_is_an_empty_table(table, text):
    if text is not None:
        table.parent.mkdir()
        table.write_text(text, encoding="utf-8")
    assert autotune._load(0) == {}


def test_what_is_stored_is_read(table):
    autotune._store(table, {"key": autotune._CANDIDATES[1]})
    assert autotune._load(0) == {"key": autotune._CANDIDATES[1]}
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_nowhere_to_write_is_no_error(table):
    table.parent.write_text("a file where the folder should be", encoding="utf-8")
    autotune._store(table, {"key": autotune._CANDIDATES[1]})


@pytest.mark.parametrize("back", [False, True])
def test_wrong_results_are_refused(back, monkeypatch):
    torch.manual_seed(0)
    shape = (3, 32, 64)
    weight = torch.randn(shape)
    stack = codec.pack(weight, CodecSettings("nf4", True, torch.uint8))
    decoded = codec.unpack(stack)

    def decode(packed, out, *, first):
        out.copy_(decoded[first : first + len(out)])

    monkeypatch.setattr(autotune.dequantize, "decode", decode)
    x = torch.randn(3 * 12, 32 if back else 64)
    weights = decoded.transpose(1, 2) if back else decoded
    right = torch.einsum("erk,enk->ern", x.view(3, 12, -1), weights).flatten(0, 1)
    offsets = torch.arange(4, dtype=torch.int32) * 12
    assert autotune._is_right(x, right, stack, offsets, back)
    for expert in range(3):
        for bad in (0.0, float("nan")):
            wrong = right.clone()
            wrong[12 * expert + 5, 7:] = bad
            assert not autotune._is_right(x, wrong, stack, offsets, back)


def test_defaults_are_candidates():
    for back, configs in autotune._DEFAULTS.items():
        for config in configs.values():
            assert config in autotune._CANDIDATES
            assert (config.features if back else config.step) <= 128


def test_each_shape_of_a_model_is_tuned_once(monkeypatch):
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=3, hidden_size=64,
                       moe_intermediate_size=128)  # fmt: skip
    with pytest.raises(moe_qlora.QuantizationError, match="no packed experts; quantize_experts"):
        moe_qlora.tune_kernels(model)
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    assert moe_qlora.tune_kernels(model) == 0  # no GPU, nothing to measure
    tuned = []
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    monkeypatch.setattr(
        autotune, "tune", lambda packed, dtype: tuned.append((packed.shape[1:], dtype))
    )
    assert moe_qlora.tune_kernels(model, torch.float16) == 2
    assert sorted(tuned) == [((64, 128), torch.float16), ((256, 64), torch.float16)]
