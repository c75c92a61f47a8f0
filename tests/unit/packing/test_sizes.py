"""Bytes on paper against bytes that packing really takes."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.memory.planner import load_extra_nbytes
from moe_qlora.packing.codec import pack
from moe_qlora.packing.settings import CodecSettings, packed_nbytes


@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (3, 5, 64), (4, 33, 31), (2, 1408, 130), (7, 3, 4, 10)]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_equals_a_packed_weight(shape, kind, double_quant):
    weight = torch.randn(shape, dtype=torch.bfloat16)
    settings = CodecSettings(kind, double_quant)
    assert packed_nbytes(shape, settings) == pack(weight, settings).nbytes


def test_bytes_of_a_weight():
    """0.5 + 4 / 64, and 0.5 + 1 / 64 + 4 / (64 * 256), where code tables do not count."""
    shape = (128, 1536, 2048)
    weights = 128 * 1536 * 2048
    plain = packed_nbytes(shape, CodecSettings("nf4")) / weights
    nested = packed_nbytes(shape, CodecSettings("fp4", True)) / weights
    assert plain == pytest.approx(0.5625, abs=1e-6)
    assert nested == pytest.approx(0.515869, abs=1e-5)


def test_loading_needs_one_matrix_and_the_statistics_in_flight():
    shapes = [(8, 64, 128), (8, 128, 32)]
    assert load_extra_nbytes(shapes, 2, CodecSettings("nf4")) == 2 * 64 * 128
    statistics = 4 * (8 * 64 * 128 // 64 + 8 * 128 * 32 // 64)
    expected = 2 * 64 * 128 + statistics
    assert load_extra_nbytes(shapes, 2, CodecSettings("fp4", True)) == expected
    assert load_extra_nbytes([(30, 65)], 4, CodecSettings("int8", True)) == 4 * 30 * 65
