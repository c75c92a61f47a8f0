"""Random expert weights: any range of them decodes as the whole does, however they are cut."""

from __future__ import annotations

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_qlora.packing import codec
from moe_qlora.packing.codec import pack, unpack, unpack_range
from moe_qlora.packing.settings import CodecSettings, why_not

KINDS = st.one_of(
    st.builds(
        CodecSettings,
        st.sampled_from(["nf4", "fp4"]),
        st.booleans(),
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    ),
    st.just(CodecSettings("int8")),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(1, 40), min_size=2, max_size=4).filter(lambda s: math.prod(s) < 60000)


@settings(max_examples=60, deadline=None)
@given(SHAPES, DTYPES, KINDS, st.integers(64, 5000), st.data())
def test_any_range_of_any_stack(
    shape: list[int], dtype: torch.dtype, kind: CodecSettings, limit: int, data: st.DataObject
) -> None:
    weight = torch.randn(shape).to(dtype)
    if why_not(weight, kind):
        return
    packed = pack(weight, kind)
    whole = unpack(packed)
    with mock.patch.object(codec, "MAX_ELEMENTS", limit):
        chunked = pack(weight, kind)
        assert torch.equal(packed.codes.view(torch.uint8), chunked.codes.view(torch.uint8))
        assert torch.equal(whole, unpack(chunked))
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    assert torch.equal(unpack_range(packed, start, stop), whole[start:stop])
    # One step of the coarsest table is under a third of the block's or row's largest weight; fp4's
    # and the 8-bit absmax table's errors fit in the rest.
    assert (whole.float() - weight.float()).abs().max() <= 0.4 * weight.float().abs().max()
