"""The specified format against what is really packed; the rule of skip patterns."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module
from upstream import SKIPPED_MODULES

from moe_qlora.packing import parametrize
from moe_qlora.packing.codec import pack, restore
from moe_qlora.packing.selection import is_skipped
from moe_qlora.packing.settings import (
    CodecSettings,
    packed_nbytes,
    packed_tensors,
)

SETTINGS = [
    CodecSettings("int8"),
    CodecSettings("fp4", False, torch.float32, torch.bfloat16),
    CodecSettings("nf4", True, torch.uint8, torch.bfloat16),
    CodecSettings("nf4", True, torch.bfloat16, torch.bfloat16),
]
# Blocks that are not full, more than one second-level block, two and four dimensions.
SHAPES = [(3, 5, 64), (4, 34, 30), (300, 64), (2, 3, 130, 64)]


@pytest.mark.parametrize(("codec", "shape"), zip(SETTINGS, SHAPES, strict=True), ids=str)
def test_state_dicts_and_blank_weights_are_as_specified(codec, shape):
    weight = torch.randn(shape)
    module = nn.Module()
    packed = pack(weight, codec)
    parametrize.attach(module, "up", packed)
    stored = {key.removeprefix("up"): tensor for key, tensor in module.state_dict().items()}
    specs = packed_tensors(shape, codec)
    assert stored.keys() == specs.keys()
    for end, spec in specs.items():
        assert stored[end].dtype == spec.dtype, end
        assert spec.shape is None or tuple(stored[end].shape) == spec.shape, end
    again = restore(stored, shape, weight.dtype, codec)
    assert CodecSettings.of(again) == dataclasses.replace(
        codec, compute_dtype=None if codec.kind == "int8" else codec.compute_dtype
    )
    assert packed_nbytes(shape, codec) == packed.nbytes
    blank = parametrize.blank_weight(shape, weight.dtype, codec)
    assert CodecSettings.of(blank) == CodecSettings.of(packed)
    assert (blank.shape, blank.dtype, blank.nbytes) == (packed.shape, packed.dtype, packed.nbytes)
    pairs = zip((packed.codes, *packed.statistics), (blank.codes, *blank.statistics), strict=True)
    for real, empty in pairs:
        assert empty.is_meta and (empty.dtype, empty.shape) == (real.dtype, real.shape)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "nf3"}, "kind is 'nf3'; expected one of nf4, fp4, int8"),
        ({"blocksize": 48}, "blocksize is 48; expected one of"),
        ({"compute_dtype": "int8"}, "compute_dtype is 'int8'"),
        ({"kind": ...}, "missing 1 required .* 'kind'"),
    ],
)
def test_settings_that_are_none(change: dict[str, Any], error: str) -> None:
    values = CodecSettings("nf4").to_dict() | change
    with pytest.raises(ValueError, match=error):
        CodecSettings.from_dict({key: one for key, one in values.items() if one is not ...})


# Few components, so that patterns hit; names that start as others do, so that boundaries matter.
COMPONENTS = st.sampled_from(["layers", "0", "1", "11", "mlp", "gate", "gate_proj", "experts"])
NAMES = st.lists(COMPONENTS, max_size=5).map(".".join)
PIECES = st.one_of(COMPONENTS, st.sampled_from([*".*+?^$|", "(", ")", r"\.", r"\d", "[01]", "1.m"]))
PATTERNS = st.one_of(NAMES, st.lists(PIECES, max_size=5).map("".join))


def answer(rule, *arguments):
    try:
        return rule(*arguments)
    except re.error:
        return "not a regex"


@SKIPPED_MODULES
@settings(max_examples=150, deadline=None)
@given(NAMES, st.lists(PATTERNS, max_size=3))
def test_the_rule_is_that_of_transformers(name: str, patterns: list[str]) -> None:
    converted = answer(should_convert_module, name, patterns)
    expected = converted if isinstance(converted, str) else not converted
    assert answer(is_skipped, name, patterns) == expected
