"""The specified format against what packing, blank weights and state dicts really hold."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn

from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack, restore
from moe_qlora.packing.settings import (
    FLOAT_DTYPES,
    STORAGE_DTYPES,
    CodecSettings,
    key_ends,
    packed_tensors,
)

SETTINGS = [
    CodecSettings("int8"),
    *(
        CodecSettings(kind, double, storage, torch.bfloat16)
        for kind, double, storage in itertools.product(
            ("nf4", "fp4"), (False, True), STORAGE_DTYPES
        )
    ),
]
# Blocks that are not full, more than one second-level block, two and four dimensions.
SHAPES = [(3, 5, 64), (4, 34, 30), (300, 64), (2, 3, 130, 64)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_state_dict_holds_what_is_specified(
    shape: tuple[int, ...], settings: CodecSettings
) -> None:
    weight = torch.randn(shape)
    module = nn.Module()
    parametrize.attach(module, "up", pack(weight, settings))
    stored = {key.removeprefix("up"): tensor for key, tensor in module.state_dict().items()}
    specs = packed_tensors(shape, settings)
    assert stored.keys() == specs.keys() == set(key_ends(settings))
    for end, spec in specs.items():
        assert stored[end].dtype == spec.dtype, end
        assert spec.shape is None or tuple(stored[end].shape) == spec.shape, end
    again = restore(stored, shape, weight.dtype, settings)
    assert CodecSettings.of(again) == dataclasses.replace(
        settings, compute_dtype=None if settings.kind == "int8" else settings.compute_dtype
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_blank_weight_is_a_packed_one_without_values(settings: CodecSettings) -> None:
    shape = (4, 96, 64)
    packed = pack(torch.randn(shape).bfloat16(), settings)
    blank = parametrize.blank_weight(shape, torch.bfloat16, settings)
    assert CodecSettings.of(blank) == CodecSettings.of(packed)
    assert (blank.shape, blank.dtype, blank.nbytes) == (packed.shape, packed.dtype, packed.nbytes)
    pairs = zip(
        (packed.codes, *packed.statistics),
        (blank.codes, *blank.statistics),
        strict=True,
    )
    for real, empty in pairs:
        assert empty.is_meta
        assert (empty.dtype, empty.shape) == (real.dtype, real.shape)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_as_json_and_back(settings: CodecSettings) -> None:
    for compute in (None, *FLOAT_DTYPES):
        same = dataclasses.replace(settings, compute_dtype=compute, blocksize=128)
        assert CodecSettings.from_dict(json.loads(json.dumps(same.to_dict()))) == same


def test_keys_of_settings() -> None:
    """A packed folder's manifest and an adapter's note are written with these."""
    assert CodecSettings("nf4", True, torch.bfloat16, torch.float16).to_dict() == {
        "kind": "nf4",
        "double_quant": True,
        "blocksize": 64,
        "storage_dtype": "bfloat16",
        "compute_dtype": "float16",
    }
    assert CodecSettings("int8").to_dict()["storage_dtype"] == "int8"


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
    ],
)
def test_settings_that_are_none(change: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        CodecSettings.from_dict(CodecSettings("nf4").to_dict() | change)


@pytest.mark.parametrize("key", ["kind", "double_quant", "blocksize"])
def test_a_missing_setting_is_named(key: str) -> None:
    values = CodecSettings("nf4").to_dict()
    del values[key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        CodecSettings.from_dict(values)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind is 'nf3'; expected one of nf4, fp4, int8"):
        CodecSettings("nf3")
