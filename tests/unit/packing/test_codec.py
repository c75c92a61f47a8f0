"""Packing equals bitsandbytes bit for bit, and decoding equals a table look-up in plain torch."""

import itertools
import math
from contextlib import AbstractContextManager
from unittest import mock

import bitsandbytes.functional as bnb
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

from moe_qlora.errors import ConfigError, UnsupportedWeightError
from moe_qlora.packing import codec
from moe_qlora.packing.codec import pack, unpack, unpack_range
from moe_qlora.packing.decoders import to_quant_state
from moe_qlora.packing.settings import CodecSettings, why_not
from tests.helpers import training
from tests.helpers.mxfp4 import keep, random_mxfp4, slow_decode

INT8 = CodecSettings("int8")
# The 4-bit types, with and without double quantization, in each storage and weight dtype.
MATRIX = [
    *itertools.product(
        ["nf4", "fp4"], [False, True], [torch.uint8, torch.bfloat16, torch.float32],
        [torch.float32, torch.bfloat16, torch.float16],
    )
]  # fmt: skip
# Rows of whole blocks, of parts of blocks, of odd length; experts that straddle blocks of 64 and,
# with double quantization, of 256 blocks; two and four dimensions; one expert.
SHAPES = [(4, 64, 128), (3, 40, 48), (5, 7, 24), (600, 16, 17), (96, 80), (2, 3, 8, 40), (1, 8, 8)]


def at_most(elements: int) -> AbstractContextManager[object]:
    """Bound the weights in one kernel call."""
    return mock.patch.object(codec, "MAX_ELEMENTS", elements)


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).mul(0.02).to(dtype)


def assert_same_state(ours: bnb.QuantState, theirs: bnb.QuantState) -> None:
    """Also in the record, which has sizes, dtypes and the offset."""
    mine, other = (state.as_dict(packed=True) for state in (ours, theirs))
    assert mine.keys() == other.keys()
    assert all(mine[key].dtype == value.dtype for key, value in other.items())
    assert all(torch.equal(mine[key], value) for key, value in other.items())


def reference_decode(codes: torch.Tensor, state: bnb.QuantState) -> torch.Tensor:
    """Code by code, block by block: table value x absmax in fp32, rounded once."""
    octets = codes.reshape(-1).view(torch.uint8).long()
    indices = torch.stack([octets >> 4, octets & 15], dim=1).reshape(-1)
    absmax = state.absmax
    if state.nested:
        outer = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: len(absmax)]
        absmax = state.state2.code[absmax.long()] * outer + state.offset
    numel = state.shape.numel()
    scale = absmax.repeat_interleave(state.blocksize)[:numel]
    return (state.code[indices[:numel]] * scale).to(state.dtype).view(state.shape)


@pytest.mark.parametrize(
    ("kind", "double", "storage", "dtype"), [*MATRIX[::5], MATRIX[4]]
)  # all pairs
def test_packs_and_decodes_as_bitsandbytes(kind, double, storage, dtype):
    settings = CodecSettings(kind, double, storage)
    for shape in SHAPES:
        original = weight(shape, dtype)
        if why_not(original, settings):
            assert (original.numel() + 1) // 2 % storage.itemsize
            continue
        codes, state = bnb.quantize_4bit(
            original, quant_type=kind, compress_statistics=double, quant_storage=storage
        )
        expected = reference_decode(codes, state)
        with at_most(1000):
            packed = pack(original, settings)
            decoded = unpack(packed)
        assert (packed.codes.dtype, packed.codes.shape) == (storage, codes.shape)
        assert torch.equal(packed.codes.view(torch.uint8), codes.view(torch.uint8))
        assert_same_state(to_quant_state(packed), state)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, expected)


def test_int8_equals_vectorwise_quant() -> None:
    original = weight((2, 3, 8, 17))
    codes, scales, _ = bnb.int8_vectorwise_quant(original.reshape(-1, 17))
    with at_most(200):
        packed = pack(original, INT8)
        decoded = unpack(packed)
    assert packed.codes.shape == original.shape and torch.equal(packed.absmax, scales)
    assert torch.equal(packed.codes.view(-1, 17), codes)
    expected = bnb.int8_vectorwise_dequant(codes, scales).bfloat16().view(original.shape)
    assert decoded.dtype == torch.bfloat16 and torch.equal(decoded, expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("shape", [(5, 7, 24), (40, 3), (3, 2, 9, 10)])
def test_any_range_of_any_stack(shape, kind):
    """Also packed from a view of other strides, in chunks."""
    original, settings = weight(shape), CodecSettings(kind, double_quant=kind == "nf4")
    packed = pack(original, settings)
    whole = unpack(packed)
    view = original.movedim(0, -1).contiguous().movedim(-1, 0)
    with at_most(70):
        chunked = pack(view, settings)
        assert torch.equal(packed.codes.view(torch.uint8), chunked.codes.view(torch.uint8))
        assert torch.equal(whole, unpack(chunked))
    for start, stop in ((0, 1), (1, 3), (2, shape[0]), (3, 3)):
        assert torch.equal(unpack_range(packed, start, stop), whole[start:stop])
    # One step of the coarsest table is under a third of the block's or row's largest weight; fp4's
    # and the 8-bit absmax table's errors fit in the rest.
    assert (whole.float() - original.float()).abs().max() <= 0.4 * original.float().abs().max()


class Allocations(TorchDispatchMode):
    """The largest tensor, in bytes, that an operator allocated."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    ("settings", "transposed"), [(CodecSettings("nf4", True), True), (INT8, False)]
)
def test_packing_allocates_no_copy_of_the_stack(settings, transposed, monkeypatch):
    monkeypatch.setattr(codec, "_CPU_CHUNK", 4096)
    stack = weight((64, 64, 64))
    view = stack.transpose(1, 2) if transposed else stack
    with Allocations() as seen:
        packed = pack(view, settings)
    assert seen.largest <= max(packed.codes.nbytes, 8 * 4096)
    with Allocations() as seen:
        assert codec.first_nonfinite(view) is None
    assert seen.largest <= stack[0].nbytes


NF4 = CodecSettings("nf4")


@pytest.mark.parametrize(
    ("tensor", "settings", "said"),
    [
        (torch.empty(2, 4, 4, device="meta"), NF4, "meta"),
        (torch.zeros(2, 4, 4, dtype=torch.float64), NF4, "float64"),
        (torch.zeros(16), NF4, "two or more dimensions"),
        (torch.zeros(0, 4, 4), NF4, "no empty one"),
        (torch.zeros(1, 3, 2), CodecSettings("nf4", storage_dtype=torch.bfloat16), "3 bytes"),
    ],
)
def test_refuses_what_cannot_be_packed(tensor, settings, said):
    with pytest.raises(UnsupportedWeightError, match=said):
        pack(tensor, settings)


@pytest.mark.parametrize("transposed", [False, True])
def test_mxfp4_decodes_to_what_the_definition_says(transposed, monkeypatch):
    """Whole and in ranges, an odd number of experts; every scale, down to subnormal numbers."""
    blocks, scales = random_mxfp4(3, 7, 96, spread=9)
    packed = keep(blocks, scales, transposed=transposed, dtype=torch.bfloat16)
    expected = slow_decode(blocks, scales)
    expected = expected.mT if transposed else expected
    assert torch.equal(unpack(packed), expected.bfloat16())
    for start, stop in [(0, 1), (2, 3), (0, 0)]:
        part = unpack_range(packed, start, stop, dtype=torch.float32)
        assert torch.equal(part, expected[start:stop])
    blocks = torch.arange(16, dtype=torch.uint8).mul(17).view(1, 1, 1, 16).repeat(1, 1, 6, 1)
    scales = torch.tensor([0, 1, 126, 127, 250, 252], dtype=torch.uint8).view(1, 1, 6)
    monkeypatch.setattr(codec, "_CPU_CHUNK", 96)
    assert torch.equal(unpack(keep(blocks, scales, transposed=False)), slow_decode(blocks, scales))


def test_finds_the_first_nonfinite_value(monkeypatch):
    monkeypatch.setattr(codec, "_CPU_CHUNK", 100)
    stack = weight((4, 6, 10))
    assert codec.first_nonfinite(stack) is None
    stack[2, 3, 4], stack[3, 0, 0] = math.nan, math.inf
    assert codec.first_nonfinite(stack) == (2, 3, 4)
    assert codec.first_nonfinite(stack.transpose(0, 2)) == (0, 0, 3)


def test_settings_follow_the_config() -> None:
    stored = {"bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(**training.NF4, **stored, llm_int8_skip_modules=["lm_head"])
    expected = CodecSettings("nf4", True, torch.bfloat16, torch.bfloat16, 64, ("lm_head",))
    assert CodecSettings.from_config(config) == expected
    assert CodecSettings.from_config(config.to_dict()) == expected
    plain = CodecSettings("fp4", False, torch.uint8, torch.float32)
    assert CodecSettings.from_config({"load_in_4bit": True}) == plain  # the class's defaults
    assert CodecSettings.from_config(BitsAndBytesConfig(load_in_8bit=True)) == INT8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({}, "neither 4 nor 8 bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "both 4 and 8 bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "int4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "banana"}, "banana"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": "lm_head"}, "list"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", None]}, "None"),
        ({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "16 bit"),
        (object(), "object"),
    ],
)
def test_refuses_configs(config: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CodecSettings.from_config(config)
