"""What the tuner takes from its file, what it stores, and which results it refuses."""

from __future__ import annotations

import json
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

from moe_qlora.kernels import (  # noqa: E402
    cards,
    grouped_mm,
    quantized_mm,
    quantized_mm_hopper,
    table,
)
from moe_qlora.kernels.expert_mm import Problem  # noqa: E402
from moe_qlora.kernels.grouped_mm import Cut  # noqa: E402
from moe_qlora.kernels.quantized_mm import Config  # noqa: E402
from moe_qlora.kernels.routing import Tiled  # noqa: E402

PORTABLE, GROUPED = quantized_mm.KERNEL, grouped_mm.KERNEL
HOPPER_KERNEL = quantized_mm_hopper.KERNEL


def stored(config):
    """What a table on disk has of a cut of the portable kernel."""
    return [PORTABLE.name, list(config)]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "kernels.json"
    monkeypatch.setattr(table, "cache_file", lambda device: path)
    table.read_tuned.cache_clear()
    yield path
    table.read_tuned.cache_clear()


def test_only_candidates_are_read(file):
    good = quantized_mm.CANDIDATES[-1]
    rows = {
        "good": stored(good),
        "hopper": [HOPPER_KERNEL.name, None],
        "none such": stored([64, 1, 4, 5, True]),
        "unknown": ["unknown", good],
        "nested": [good],
        "bools": [True],
        "text": "x",
    }
    file.parent.mkdir()
    file.write_text(json.dumps(rows), encoding="utf-8")
    expected = {"good": (PORTABLE.name, good), "hopper": (HOPPER_KERNEL.name, None)}
    assert table.read_tuned(0) == expected


@pytest.mark.parametrize("text", [None, "", "[1]", "\x00"])
def test_a_missing_or_broken_file_is_an_empty_table(file, text):
    if text is not None:
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    assert table.read_tuned(0) == {}


def test_what_is_stored_is_read(file):
    known = {"key": (PORTABLE.name, PORTABLE.cuts[1]), "other": (GROUPED.name, GROUPED.cuts[0])}
    table._store(file, known)
    assert table.read_tuned(0) == known
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_nowhere_to_write_is_no_error(file):
    file.parent.write_text("a file where the folder should be", encoding="utf-8")
    table._store(file, {"key": (PORTABLE.name, PORTABLE.cuts[1])})


@pytest.mark.parametrize("back", [False, True])
def test_wrong_results_are_refused(back, monkeypatch):
    torch.manual_seed(0)
    shape = (3, 32, 64)
    weight = torch.randn(shape)
    stack = codec.pack(weight, CodecSettings("nf4", True, torch.uint8))
    decoded = codec.unpack(stack)

    def decode(packed, out, *, first):
        out.copy_(decoded[first : first + len(out)])

    monkeypatch.setattr(table, "decode", decode)
    x = torch.randn(3 * 12, 32 if back else 64)
    weights = decoded.transpose(1, 2) if back else decoded
    right = torch.einsum("erk,enk->ern", x.view(3, 12, -1), weights).flatten(0, 1)
    offsets = torch.arange(4, dtype=torch.int32) * 12
    assert table._matches(x, right, stack, offsets, not back)
    for expert in range(3):
        for bad in (0.0, float("nan")):
            wrong = right.clone()
            wrong[12 * expert + 5, 7:] = bad
            assert not table._matches(x, wrong, stack, offsets, not back)


AMPERE_LARGE = cards.Card("nvidia", (8, 0), 163 << 10)
HOPPER = cards.Card("nvidia", cards.HOPPER, 227 << 10)
CPU = torch.device("cpu")


@pytest.mark.parametrize("card", [cards.PORTABLE, AMPERE_LARGE, HOPPER])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_defaults_are_candidates_that_fit(card, back, tile):
    packed = codec.pack(torch.randn(1, 64, 64), CodecSettings("nf4", True, torch.uint8))
    problem = Problem(packed.spec, torch.bfloat16, tile, not back)
    with cards.acting_as(card):
        config, cut = PORTABLE.default(problem, tile), GROUPED.default(problem, tile)
        assert config in PORTABLE.cuts and PORTABLE.fits(config, problem, tile)
        int8 = problem._replace(spec=packed.spec._replace(kind="int8"))
        assert PORTABLE.fits(config, int8, tile)
    assert (config.features if back else config.step) <= 128
    assert cut in GROUPED.cuts and grouped_mm.fits(cut, tile, card)


def test_what_a_card_has_no_room_for_is_neither_used_nor_measured(monkeypatch):
    # (kernel, cut, tile, kind, whether a card with 99 KiB may, whether Hopper may)
    cases = [
        (PORTABLE, Config(128, 64, 3, 4, False), 128, "nf4", False, True),  # 128 sums a thread
        (PORTABLE, Config(128, 64, 3, 8, False), 128, "nf4", True, True),
        (PORTABLE, Config(256, 64, 3, 4, False), 128, "nf4", False, False),
        (PORTABLE, Config(64, 128, 4, 4, False), 128, "int8", False, True),  # 120 KiB of loads
        (PORTABLE, Config(64, 128, 4, 4, False), 64, "int8", True, True),
        (HOPPER_KERNEL, None, 128, "nf4", False, True),
    ]
    monkeypatch.setattr(table, "validated", {(HOPPER_KERNEL.name, "nf4", -1): True})
    offsets = torch.zeros(2, dtype=torch.int32)
    for kernel, cut, tile, kind, small, large in cases:
        assert (kernel, cut) in table.candidates("codes")
        packed = codec.pack(torch.randn(1, 64, 128), CodecSettings(kind, True, torch.uint8))
        problem = Problem(packed.spec, torch.bfloat16, tile, True)
        for card, allowed in ((cards.PORTABLE, small), (HOPPER, large)):
            measured = []
            monkeypatch.setattr(table, "_elapsed", lambda *_: measured.append(1) or 1.0)  # noqa: B023
            rows = torch.zeros(3, 128), Tiled(offsets, 1, 3, offsets)
            with cards.acting_as(card):
                elapsed = table._try(rows, packed, problem, tile, kernel, cut)
            assert (elapsed is not None, bool(measured)) == (allowed, allowed), (cut, card)


def test_a_table_from_elsewhere_gives_no_configuration_without_room(monkeypatch):
    packed = codec.pack(torch.randn(1, 64, 64), CodecSettings("nf4", True, torch.uint8))
    spec = packed.spec._replace(device=0)
    problem = Problem(spec, torch.bfloat16, 256, True)
    wide, cut = Config(128, 64, 4, 4, True), Cut(256, 64, 4, 8, 8)
    known = {
        table.key_of(problem, 128, "codes"): (PORTABLE.name, wide),
        table.key_of(problem, 128, "grouped"): (GROUPED.name, cut),
    }
    monkeypatch.setattr(table, "read_tuned", lambda index: known)
    monkeypatch.setattr(table, "validated", {(k.name, "nf4", 0): False for k in table.KERNELS})
    on_a_gpu = SimpleNamespace(spec=spec)
    for card, taken in ((cards.PORTABLE, False), (HOPPER, True)):
        with cards.acting_as(card):
            chosen = table.choose(on_a_gpu, 256, torch.bfloat16, by_rows=True)
            dequantized = table.choose(on_a_gpu, 256, torch.float16, by_rows=True, held=True)
            assert dequantized.kernel is GROUPED
            found = table.tuned(problem, 128, GROUPED)
        assert (chosen.kernel, chosen.tile) == (PORTABLE, 128)
        assert (chosen.cut == wide, found == (GROUPED, cut)) == (taken, taken)


def test_a_table_may_prefer_the_portable_kernel(monkeypatch):
    """And name a kernel of fixed cut where that one runs; the default serves elsewhere."""
    packed = codec.pack(torch.randn(1, 64, 128), CodecSettings("nf4", True, torch.uint8))
    spec = packed.spec._replace(device=0)
    key = table.key_of(Problem(spec, torch.bfloat16, 256, True), 128, "codes")
    wide = Config(128, 64, 4, 4, True)
    on_a_gpu = SimpleNamespace(spec=spec)
    for works, known, expected in [
        (True, {}, (HOPPER_KERNEL, None)),
        (True, {key: (PORTABLE.name, wide)}, (PORTABLE, wide)),
        (True, {key: (HOPPER_KERNEL.name, None)}, (HOPPER_KERNEL, None)),
        (False, {key: (PORTABLE.name, wide)}, (PORTABLE, wide)),
        (False, {key: (HOPPER_KERNEL.name, None)}, (PORTABLE, Config(128, 64, 3, 4, False))),
    ]:
        monkeypatch.setattr(table, "read_tuned", lambda index, known=known: known)
        tried = {(k.name, "nf4", 0): False for k in table.KERNELS}
        tried[HOPPER_KERNEL.name, "nf4", 0] = works
        monkeypatch.setattr(table, "validated", tried)
        with cards.acting_as(HOPPER):
            chosen = table.choose(on_a_gpu, 256, torch.bfloat16, by_rows=True)
        assert (chosen.kernel, chosen.cut) == expected


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
        table, "tune", lambda packed, dtype: tuned.append((packed.shape[1:], dtype))
    )
    with caplog.at_level("WARNING", "moe_qlora"):
        assert moe_qlora.tune_kernels(model, torch.float16) == 2
    told = [record.getMessage() for record in caplog.records]
    assert ["compiling and measuring" in line for line in told] == [True, True]
    assert "experts of 256 x 64 (fp4)" in "".join(told)
    assert sorted(tuned) == [((64, 128), torch.float16), ((256, 64), torch.float16)]
