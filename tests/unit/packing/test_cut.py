"""Shares of packed weights: cut and joined without a bit of difference, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_qlora.errors import UnsupportedWeightError
from moe_qlora.packing.codec import pack, unpack, unpack_range
from moe_qlora.packing.codecs import codec_of
from moe_qlora.packing.settings import CodecSettings

KINDS = [
    CodecSettings("nf4"),
    CodecSettings("nf4", double_quant=True),
    CodecSettings("fp4", double_quant=True, storage_dtype=torch.bfloat16),
    CodecSettings("int8"),
]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_share_is_the_experts_of_the_whole_and_shares_join_to_it(settings, ranks):
    whole = pack(weight(6, 128, 128), settings)  # an expert is a whole second-level block
    count = 6 // ranks
    parts = [codec_of(whole.kind).cut(whole, first, first + count) for first in range(0, 6, count)]
    for rank, part in enumerate(parts):
        assert part.shape == (count, 128, 128)
        assert CodecSettings.of(part) == CodecSettings.of(whole)
        expected = unpack_range(whole, rank * count, (rank + 1) * count)
        assert torch.equal(unpack(part), expected)
    joined = codec_of(parts[0].kind).join(parts)
    assert joined.shape == whole.shape
    assert torch.equal(joined.flat_codes, whole.flat_codes)
    for one, other in zip(joined.statistics, whole.statistics, strict=True):
        assert torch.equal(one, other)


def test_a_share_holds_none_of_the_whole_weights_memory():
    whole = pack(weight(4, 64, 64), CodecSettings("nf4"))
    part = codec_of(whole.kind).cut(whole, 1, 3)
    before = unpack(part)
    whole.codes.zero_()
    whole.absmax.zero_()
    assert torch.equal(unpack(part), before)


def test_second_level_blocks_of_two_ranks_are_coded_anew():
    settings = CodecSettings("nf4", double_quant=True)
    whole = pack(weight(4, 48, 64), settings)  # 48 first-level blocks an expert, 256 to a block
    assert not settings.codec.is_exact(whole.shape, 0, 2, settings)
    assert settings.codec.is_exact(whole.shape, 0, 4, settings)
    assert settings.codec.is_exact(whole.shape, 0, 2, replace(settings, double_quant=False))
    parts = [codec_of(whole.kind).cut(whole, 0, 2), codec_of(whole.kind).cut(whole, 2, 4)]
    joined = codec_of(parts[0].kind).join(parts)
    assert torch.equal(joined.flat_codes, whole.flat_codes)
    for near in (torch.cat([unpack(part) for part in parts]), unpack(joined)):
        # absmax are held in 8 bit: rounded once more
        torch.testing.assert_close(near, unpack(whole), rtol=0.02, atol=0.02)
    assert not torch.equal(torch.cat([unpack(part) for part in parts]), unpack(whole))


@pytest.mark.parametrize(
    ("shape", "settings", "ranks", "reason"),
    [
        ((6, 8, 8), CodecSettings("nf4"), 4, "6 experts, which 4 ranks"),
        ((6, 8, 6), CodecSettings("nf4"), 3, "96 weights for each of 3 ranks"),
        ((6, 8, 6), CodecSettings("int8"), 3, None),
        ((6, 8, 8), CodecSettings("nf4"), 3, None),
    ],
)
def test_what_cannot_be_divided(shape, settings, ranks, reason):
    seen = settings.codec.why_not_cut(shape, ranks, settings)
    assert (seen is None) if reason is None else (reason in seen)


def test_experts_within_one_block_cannot_be_told_apart():
    with pytest.raises(UnsupportedWeightError, match="48 weights an expert"):
        codec_of("nf4").cut(pack(weight(4, 6, 8), CodecSettings("nf4")), 0, 2)
