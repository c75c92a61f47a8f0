"""What the tuner takes from its file, what it stores, and which results it refuses."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts import backend
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings
from moe_qlora.testing import tiny_model

triton = pytest.importorskip("triton")

from moe_qlora.kernels import autotune, cards, grouped_mm, quantized_config  # noqa: E402
from moe_qlora.kernels.grouped_mm import Cut  # noqa: E402
from moe_qlora.kernels.quantized_config import HOPPER as HOPPER_KERNEL  # noqa: E402
from moe_qlora.kernels.quantized_mm import Config  # noqa: E402


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


AMPERE_LARGE = cards.Card("nvidia", (8, 0), 163 << 10)
HOPPER = cards.Card("nvidia", cards.HOPPER, 227 << 10)
CPU = torch.device("cpu")


@pytest.mark.parametrize("card", [cards.PORTABLE, AMPERE_LARGE, HOPPER])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_defaults_are_candidates_that_fit(card, back, tile):
    with cards.acting_as(card):
        config = quantized_config.default(tile, CPU, back=back)
        cut = grouped_mm.default(tile, CPU)
    assert config in autotune._CANDIDATES
    assert (config.features if back else config.step) <= 128
    assert all(quantized_config.fits(config, tile, kind, card) for kind in ("nf4", "int8"))
    assert cut in grouped_mm.CANDIDATES and grouped_mm.fits(cut, tile, card)


def test_what_a_card_has_no_room_for_is_neither_used_nor_measured(monkeypatch):
    # (config, tile, kind, whether a card with 99 KiB may, whether Hopper may)
    cases = [
        (Config(128, 64, 3, 4, False), 128, "nf4", False, True),  # 128 sums a thread
        (Config(128, 64, 3, 8, False), 128, "nf4", True, True),
        (Config(256, 64, 3, 4, False), 128, "nf4", False, False),
        (Config(64, 128, 4, 4, False), 128, "int8", False, True),  # 120 KiB of loads
        (Config(64, 128, 4, 4, False), 64, "int8", True, True),
        (HOPPER_KERNEL, 128, "nf4", False, True),
    ]
    for config, tile, kind, small, large in cases:
        assert config in autotune._CANDIDATES
        stack = codec.pack(torch.randn(1, 64, 64), CodecSettings(kind, True, torch.uint8))
        for card, allowed in ((cards.PORTABLE, small), (HOPPER, large)):
            hopper = card is HOPPER
            monkeypatch.setattr(autotune, "on_hopper", lambda *_, back, hopper=hopper: hopper)
            measured = []
            monkeypatch.setattr(autotune, "_elapsed", lambda *_: measured.append(1) or 1.0)  # noqa: B023
            problem = torch.zeros(3, 64), torch.zeros(2), torch.zeros(2), torch.zeros(2)
            with cards.acting_as(card):
                elapsed = autotune._try(problem, stack, tile, False, config)
            assert (elapsed is not None, bool(measured)) == (allowed, allowed), (config, card)


def test_a_table_from_elsewhere_gives_no_configuration_without_room(monkeypatch):
    stack = codec.pack(torch.randn(1, 64, 64), CodecSettings("nf4", True, torch.uint8))
    key = partial(autotune._key, stack, torch.bfloat16, 128, False)
    wide, cut = Config(128, 64, 4, 4, True), Cut(256, 64, 4, 8, 8)
    monkeypatch.setattr(autotune, "_load", lambda index: {key(): wide, key("grouped"): cut})
    on_a_gpu = SimpleNamespace(
        device=torch.device("cuda", 0), spec=stack.spec, kind=stack.kind
    )  # fmt: skip
    monkeypatch.setattr(autotune, "on_hopper", lambda *_, back: False)
    for card, taken in ((cards.PORTABLE, False), (HOPPER, True)):
        with cards.acting_as(card):
            config = autotune.chosen(on_a_gpu, torch.bfloat16, 128, back=False)
            chosen_cut = autotune.chosen_cut(on_a_gpu, torch.bfloat16, 128, back=False)
        assert (config == wide, chosen_cut == cut) == (taken, taken)


def test_each_shape_of_a_model_is_tuned_once(monkeypatch, caplog):
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
    with caplog.at_level("WARNING", "moe_qlora"):
        assert moe_qlora.tune_kernels(model, torch.float16) == 2
    told = [record.getMessage() for record in caplog.records]
    assert ["compiling and measuring" in line for line in told] == [True, True]
    assert "experts of 256 x 64 (fp4)" in "".join(told)
    assert sorted(tuned) == [((64, 128), torch.float16), ((256, 64), torch.float16)]
