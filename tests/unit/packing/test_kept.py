"""MXFP4 weights kept as their checkpoint has them: decode, device moves, shares, state dicts."""

from __future__ import annotations

import pytest
import torch

from moe_qlora.packing import codec
from tests.helpers.mxfp4 import keep, random_mxfp4, slow_decode

SHAPE = (3, 7, 96)  # as stored: an odd number of experts, and rows of three blocks


def whole(blocks, scales, transposed):
    decoded = slow_decode(blocks, scales)
    return decoded.transpose(-1, -2) if transposed else decoded


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPE, torch.bfloat16), ((1, 3, 160), torch.float32)]
)
def test_decodes_to_what_the_definition_says(shape, transposed, dtype):
    blocks, scales = random_mxfp4(*shape, spread=9)
    packed = keep(blocks, scales, transposed=transposed, dtype=dtype)
    expected = whole(blocks, scales, transposed).to(dtype)
    assert packed.shape == expected.shape and packed.stored_shape == shape
    decoded = codec.unpack(packed)
    assert decoded.dtype == dtype and torch.equal(decoded, expected)
    for start, stop in [(0, 1), (shape[0] - 1, shape[0]), (0, 0)]:
        part = codec.unpack_range(packed, start, stop, dtype=torch.float32)
        assert torch.equal(part, whole(blocks, scales, transposed)[start:stop])


def test_every_scale_down_to_subnormal_numbers_and_in_chunks(monkeypatch):
    blocks = torch.arange(16, dtype=torch.uint8).mul(17).view(1, 1, 1, 16).repeat(1, 1, 6, 1)
    scales = torch.tensor([0, 1, 126, 127, 250, 252], dtype=torch.uint8).view(1, 1, 6)
    packed = keep(blocks, scales, transposed=False)
    for chunk in (codec._CPU_CHUNK, 96):
        monkeypatch.setattr(codec, "_CPU_CHUNK", chunk)
        assert torch.equal(codec.unpack(packed), slow_decode(blocks, scales))
