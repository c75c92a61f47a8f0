"""The specified format against what packing, blank weights and state dicts really hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

from moe_qlora.memory.planner import load_extra_nbytes
from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack, restore
from moe_qlora.packing.settings import (
    FLOAT_DTYPES,
    STORAGE_DTYPES,
    CodecSettings,
    packed_nbytes,
    packed_tensors,
)

FORMATS = itertools.product(("nf4", "fp4"), (False, True), STORAGE_DTYPES)
SETTINGS = [
    CodecSettings("int8"),
    *(CodecSettings(*each, torch.bfloat16) for each in FORMATS),
]
# Blocks that are not full, more than one second-level block, two and four dimensions.
SHAPES = [(3, 5, 64), (4, 34, 30), (300, 64), (2, 3, 130, 64)]


@pytest.mark.parametrize(
    ("settings", "shape"), zip(SETTINGS, itertools.cycle(SHAPES), strict=False), ids=str
)
def test_state_dicts_and_blank_weights_are_as_specified(
    settings: CodecSettings, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(shape)
    module = nn.Module()
    packed = pack(weight, settings)
    parametrize.attach(module, "up", packed)
    stored = {key.removeprefix("up"): tensor for key, tensor in module.state_dict().items()}
    specs = packed_tensors(shape, settings)
    assert stored.keys() == specs.keys()
    for end, spec in specs.items():
        assert stored[end].dtype == spec.dtype, end
        assert spec.shape is None or tuple(stored[end].shape) == spec.shape, end
    again = restore(stored, shape, weight.dtype, settings)
    assert CodecSettings.of(again) == dataclasses.replace(
        settings, compute_dtype=None if settings.kind == "int8" else settings.compute_dtype
    )
    assert packed_nbytes(shape, settings) == packed.nbytes
    blank = parametrize.blank_weight(shape, weight.dtype, settings)
    assert CodecSettings.of(blank) == CodecSettings.of(packed)
    assert (blank.shape, blank.dtype, blank.nbytes) == (packed.shape, packed.dtype, packed.nbytes)
    pairs = zip((packed.codes, *packed.statistics), (blank.codes, *blank.statistics), strict=True)
    for real, empty in pairs:
        assert empty.is_meta and (empty.dtype, empty.shape) == (real.dtype, real.shape)


def test_bytes_of_a_weight_and_of_its_load() -> None:
    """0.5 + 4 / 64, and 0.5 + 1 / 64 + 4 / (64 * 256), where code tables do not count."""
    shape, weights = (128, 1536, 2048), 128 * 1536 * 2048
    plain = packed_nbytes(shape, CodecSettings("nf4")) / weights
    nested = packed_nbytes(shape, CodecSettings("fp4", True)) / weights
    assert plain == pytest.approx(0.5625, abs=1e-6)
    assert nested == pytest.approx(0.515869, abs=1e-5)
    shapes, matrix = [(8, 64, 128), (8, 128, 32)], 2 * 64 * 128
    assert load_extra_nbytes(shapes, 2, CodecSettings("nf4")) == matrix
    statistics = 4 * (8 * 64 * 128 // 64 + 8 * 128 * 32 // 64)
    assert load_extra_nbytes(shapes, 2, CodecSettings("fp4", True)) == matrix + statistics
    assert load_extra_nbytes([(30, 65)], 4, CodecSettings("int8", True)) == 4 * 30 * 65


def test_settings_as_json_and_back() -> None:
    """A packed folder's manifest and an adapter's note are written with these keys."""
    for settings, compute in itertools.product(SETTINGS, (None, *FLOAT_DTYPES)):
        same = dataclasses.replace(settings, compute_dtype=compute, blocksize=128)
        assert CodecSettings.from_dict(json.loads(json.dumps(same.to_dict()))) == same
    assert CodecSettings("nf4", True, torch.bfloat16, torch.float16).to_dict() == {
        "kind": "nf4",
        "double_quant": True,
        "blocksize": 64,
        "storage_dtype": "bfloat16",
        "compute_dtype": "float16",
    }
    assert CodecSettings("int8").to_dict()["storage_dtype"] == "int8"
    coarse = CodecSettings("nf4", blocksize=128)
    assert CodecSettings.of(pack(torch.randn(4, 256), coarse)) == coarse


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "nf3"}, "kind is 'nf3'; expected one of 'nf4', 'fp4', 'int8'"),
        ({"blocksize": 0}, "blocksize is 0; expected a power of two from 32 to 4096"),
        ({"blocksize": 48}, "blocksize is 48; expected a power of two"),
        ({"blocksize": 8192}, "blocksize is 8192; expected a power of two"),
        ({"blocksize": True}, "blocksize is True"),
        ({"double_quant": 1}, "double_quant is 1; expected one of False, True"),
        ({"storage_dtype": "nn"}, "storage_dtype is 'nn'"),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8'"),
        ({"stored_transposed": 1}, "stored_transposed is 1"),
        *(({key: ...}, f"{key} is missing") for key in ("kind", "double_quant", "blocksize")),
    ],
)
def test_settings_that_are_none(change: dict[str, Any], error: str) -> None:
    values = CodecSettings("nf4").to_dict() | change
    with pytest.raises(ValueError, match=error):
        CodecSettings.from_dict({key: one for key, one in values.items() if one is not ...})


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind is 'nf3'; expected one of nf4, fp4, int8"):
        CodecSettings("nf3")
