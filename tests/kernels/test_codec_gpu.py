"""On a CUDA device: packing equals bitsandbytes bit for bit, and packed models move."""

from unittest import mock

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn

from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.codec import pack, unpack, unpack_range
from moe_qlora.packing.decoders import from_quant_state
from moe_qlora.packing.settings import CodecSettings, why_not
from tests.unit.packing.test_codec import MATRIX

pytestmark = pytest.mark.gpu

INT8 = CodecSettings("int8")
SHAPES = [(4, 64, 128), (3, 40, 48), (600, 16, 17), (96, 80)]


@pytest.mark.parametrize(("kind", "double", "storage_dtype", "dtype"), MATRIX)
def test_packs_and_decodes_as_bitsandbytes(kind, double, storage_dtype, dtype):
    settings = CodecSettings(kind, double, storage_dtype)
    for shape in SHAPES:
        weight = torch.randn(shape, device="cuda").to(dtype)
        if why_not(weight, settings):
            continue
        codes, state = bnb.quantize_4bit(
            weight, quant_type=kind, compress_statistics=double, quant_storage=storage_dtype
        )
        whole = bnb.dequantize_4bit(codes, state)
        for limit in (codec.MAX_ELEMENTS, 1000):
            middle = slice(shape[0] // 3, shape[0] // 2 + 1)
            with mock.patch.object(codec, "MAX_ELEMENTS", limit):
                packed = pack(weight, settings)
                decoded = unpack(packed)
                part = unpack_range(packed, middle.start, middle.stop)
            assert torch.equal(packed.codes.view(torch.uint8), codes.view(torch.uint8))
            for ours, theirs in zip(
                packed.statistics, from_quant_state(codes, state).statistics, strict=True
            ):
                assert torch.equal(ours, theirs)
            assert torch.equal(decoded, whole)
            assert torch.equal(part, whole[middle])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_equals_vectorwise_quant(dtype):
    weight = torch.randn(4, 40, 64, device="cuda").to(dtype)
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.view(-1, 64).half())
    for limit in (codec.MAX_ELEMENTS, 200):
        with mock.patch.object(codec, "MAX_ELEMENTS", limit):
            packed = pack(weight, INT8)
            decoded = unpack(packed)
        assert torch.equal(packed.codes.view(-1, 64), codes)
        assert torch.equal(packed.absmax, scales)
        expected = bnb.int8_vectorwise_dequant(codes, scales).to(dtype).view_as(weight)
        assert torch.equal(decoded, expected)


@pytest.mark.parametrize("settings", [CodecSettings("nf4", True), CodecSettings("fp4"), INT8])
def test_modules_move_with_their_statistics(settings):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(5, 40, 48).bfloat16())
    parametrize.attach(module, "weight", pack(module.weight, settings))
    here = module.weight
    for device in ("cuda", "cpu", "cuda"):
        module.to(device)
        packed = parametrize.read_packed(module, "weight")
        found = {packed.device.type, *(tensor.device.type for tensor in packed.statistics)}
        assert found == {device}
        # The CPU's and the device's kernels round the same fp32 product.
        assert torch.equal(module.weight.cpu(), here)


def test_packing_peak_is_the_packed_form_and_a_chunk():
    weight = torch.randn(64, 1024, 2048, device="cuda", dtype=torch.bfloat16)
    pack(weight[:1], CodecSettings("nf4", True))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack(weight, CodecSettings("nf4", True))
    extra = torch.cuda.max_memory_allocated() - before - packed.nbytes
    # One chunk's codes and absmax, and the fp32 absmax that double quantization starts from.
    assert extra < 2**24 + weight.numel() // 64 * 4 * 1.1
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert codec.first_nonfinite(weight) is None
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.parametrize("settings", [CodecSettings("nf4"), CodecSettings("nf4", True), INT8])
def test_stacks_beyond_int32(settings):
    weight = torch.empty(33, 8192, 8192, device="cuda", dtype=torch.bfloat16).normal_()
    assert weight.numel() > 2**31
    packed = pack(weight, settings)
    whole = unpack(packed)
    for expert in (0, 31, 32):
        part = unpack_range(packed, expert, expert + 1)
        assert torch.equal(whole[expert : expert + 1], part)
        if not settings.double_quant:
            assert torch.equal(part, unpack(pack(weight[expert : expert + 1], settings)))
    errors = (whole[32] - weight[32]).abs().max() / weight[32].abs().max()
    assert errors < 0.2
