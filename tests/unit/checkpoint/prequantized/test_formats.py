"""Single tensors of every format: by their definitions, and by those who define them.

compressed-tensors, which decodes whole tensors, is compared where it is installed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from folders import same
from prequantized import compressed, expand, write_tensors
from torch import Tensor
from transformers.modeling_utils import local_torch_dtype

from moe_qlora.checkpoint.prequantized import open_plain

BF16, FP8, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu


def e4m3(code: int) -> float:
    """The value of a byte, by the definition: 1 bit of sign, 4 of exponent (bias 7), 3."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = torch.tensor([e4m3(code) for code in range(256)])


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(), dtype=torch.uint8)


def fp8_codes(*shape: int) -> Tensor:
    """Bytes of every value but NaN."""
    codes = drawn(0, 256, *shape)
    return codes.where((codes & 127) != 127, 5)


def powers(exponents: Tensor) -> Tensor:
    return torch.pow(2.0, exponents.double() - 127).float()


def read(folder: Path, key: str = "a.weight") -> Tensor:
    with open_plain(folder) as checkpoint:
        assert list(checkpoint) == [key]
        value = checkpoint.read(key)
        middle = value.shape[0] // 3
        assert same(checkpoint.read(key, middle, middle + 2), value[middle : middle + 2].clone())
        assert value.is_contiguous()
        return value


def fp8(block) -> dict:
    return {"quant_method": "fp8", "weight_block_size": block}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("a.weight_scale_inv", dtype) for dtype in (torch.float32, BF16, torch.uint8)),
        *(("a.scale", E8M0), ("a.qscale_weight", torch.float16)),
    ],
)
def test_blocks_are_cut_off_at_the_edges(tmp_path, name, dtype):
    """Rows and columns of DeepSeek-V3's kv_a, 576 x 7168 in blocks of 128, but eight times less."""
    codes, exponents = fp8_codes(72, 50), drawn(110, 135, 5, 4)
    stored = (torch.rand(5, 4, generator=generator()) + 0.01).to(dtype)
    values = stored.float()
    if dtype in (torch.uint8, E8M0):
        stored, values = exponents.view(dtype), powers(exponents)
    tensors = {"a.weight": codes.view(FP8), name: stored}
    value = read(write_tensors(tmp_path, fp8([16, 16]), tensors))
    assert same(value, (E4M3[codes.long()] * expand(values, (16, 16), 72, 50)).to(BF16))


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        *((None, shape) for shape in ((), (1,), (3,), (3, 1, 1), (3, 7), (3, 7, 1))),
        *(([4, 3], (3, 2, 4)), ([1, 5], (3, 7, 2)), ([16, 16], (3, 1, 1))),
    ],
)
def test_stacks_of_experts(tmp_path, block, shape):
    codes, scale = fp8_codes(3, 7, 10), torch.rand(shape, generator=generator()) + 0.1
    tensors = {"x.gate_up_proj": codes.view(FP8), "x.gate_up_proj_scale_inv": scale}
    value = read(write_tensors(tmp_path, fp8(block), tensors), "x.gate_up_proj")
    own = scale.reshape(*shape, *(1,) * (3 - len(shape)))
    high, wide = block or (7 if own.shape[1] == 1 else 1, 10)
    grid = own.repeat_interleave(high, 1)[:, :7].repeat_interleave(wide, 2)[..., :10]
    assert same(value, (E4M3[codes.long()] * grid).to(BF16))


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_every_byte_is_the_value_that_torch_has_for_it(tmp_path, dtype):
    """-0, subnormals, infinities and NaN among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(())}
    with open_plain(write_tensors(tmp_path, fp8(None), tensors)) as checkpoint:
        value = checkpoint.read("a.weight")
    for wanted in (codes.float(), *([E4M3.view(16, 16)] if dtype == FP8 else [])):
        assert torch.equal(value.isnan(), wanted.isnan())
        assert same(*(t.nan_to_num(7.0, math.inf, -math.inf) for t in (value, wanted.to(BF16))))


def test_exponents_at_their_ends(tmp_path):
    """2^-127 is subnormal in fp32, 2^127 the largest; 255 is no number, and makes no numbers."""
    tensors = {"e_blocks": torch.full((1, 4, 1, 16), 0x22, dtype=torch.uint8)}
    tensors["e_scales"] = torch.tensor([[[127], [0], [254], [255]]], dtype=torch.uint8)
    with open_plain(write_tensors(tmp_path, {"quant_method": "mxfp4"}, tensors)) as checkpoint:
        value = checkpoint.read("e")
    assert torch.equal(value[0, 0, :3].double(), torch.tensor([1.0, 2.0**-127, 2.0**127]).double())
    assert bool(value[0, :, 3].isnan().all())


BLOCKS = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}


@pytest.mark.parametrize(
    ("config", "end", "shape"),
    [
        (BLOCKS, "", (2, 1, 2, 1)),  # modelopt keeps dimensions of one between
        *(({"quant_method": "fp8"}, "_inv", shape) for shape in ((2, 2), (), (200, 1))),
        ({"quant_method": "mxfp8"}, "_inv", (200, 5)),
    ],
)
def test_blocks_without_a_size_are_their_makers(tmp_path, config, end, shape):
    """Those of transformers and of vLLM, where no block size is given."""
    codes, scale = fp8_codes(200, 130).view(FP8), torch.rand(shape, generator=generator())
    tensors = {"a.weight": codes, f"a.weight_scale{end}": scale}
    value = read(write_tensors(tmp_path, config, tensors))
    if scale.numel() == 4:
        scale = expand(scale.view(2, 2), (128, 128), 200, 130)
    if scale.numel() == 1000:
        scale = expand(scale, (1, 32), 200, 130)
    assert same(value, (codes.float() * scale).to(BF16))


SMALL = fp8_codes(4, 6).view(FP8)
TENSORS = {"a.weight": SMALL, "a.weight_scale": torch.tensor(0.5)}
HALF = (SMALL.float() / 2).to(BF16)


@pytest.mark.parametrize("algorithm", ["FP8", None])
def test_modelopt_says_it_in_a_file_of_its_own(tmp_path, algorithm):
    """It may have quantized the cache only."""
    plain = {"a.weight": HALF, "a.k_scale": torch.ones(1)}
    folder = write_tensors(tmp_path, None, TENSORS if algorithm else plain)
    said = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with open_plain(folder) as checkpoint:
        assert same(checkpoint.read("a.weight"), HALF)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        *(({"dtype": name}, BF16) for name in ("auto", None, "float8_e4m3fn")),
    ],
)
def test_the_dtype_is_that_of_the_configuration(tmp_path, config, dtype):
    folder = write_tensors(tmp_path, fp8(None), TENSORS, **config)
    assert same(read(folder), (SMALL.float() / 2).to(dtype))


def scheme(form: str, kind: str, strategy: str, **more) -> tuple[str, dict]:
    """A format, and how its weights are stored: `kind` as in "4 int"."""
    bits, kind = kind.split()
    return form, {"num_bits": int(bits), "type": kind, "strategy": strategy, **more}


U8 = {"group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES = {
    "int4 group": scheme("pack-quantized", "4 int", "group", group_size=32),
    "int4 channel": scheme("pack-quantized", "4 int", "channel"),
    "int8 group": scheme("pack-quantized", "8 int", "group", group_size=16),
    "int8 plain": scheme("int-quantized", "8 int", "channel"),
    "fp8 channel": scheme("float-quantized", "8 float", "channel"),
    "fp8 tensor": scheme("float-quantized", "8 float", "tensor"),
    "fp8 group": scheme("float-quantized", "8 float", "group", group_size=32),
    "fp8 block": scheme("float-quantized", "8 float", "block", block_structure=[16, 32]),
    "mxfp8": scheme("mxfp8-quantized", "8 float", "group", **U8),
    "nvfp4": scheme("nvfp4-pack-quantized", "4 float", "tensor_group", group_size=16),
    "mxfp4": scheme("mxfp4-pack-quantized", "4 float", "group", **U8),
}


def compressed_parts(form, weights, weight):
    """What compressed-tensors stores for a weight, and what it decodes that to."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    rows, columns = weight.shape
    high, wide = args.block_structure or (1, args.group_size or columns)
    if args.strategy == "tensor":
        high, wide = rows, columns
    tiles = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    tiles = tiles.view(tiles.shape[0] // high, high, tiles.shape[1] // wide, wide)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max().float()).reshape(1)
    scale, _ = calculate_qparams(
        tiles.amin((1, 3)), tiles.amax((1, 3)), args, global_scale=state.get("weight_global_scale")
    )
    state["weight_scale"] = scale.reshape(1) if args.strategy == "tensor" else scale
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    assert library.__version__
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_is_the_one_that_compressed_tensors_decodes(name, dtype, tmp_path):
    form, weights = SCHEMES[name]
    generator = torch.Generator().manual_seed(7)
    rows = 48 if "block" not in name else 56
    weight = torch.randn(rows, 96, generator=generator).to(dtype)
    stored, decoded = compressed_parts(form, weights, weight)
    tensors = {f"model.layers.0.mlp.up_proj.{key}": t.contiguous() for key, t in stored.items()}
    folder = write_tensors(tmp_path, compressed(form, weights, []), tensors, dtype="float32")
    with open_plain(folder) as checkpoint, local_torch_dtype(torch.bfloat16):  # loads set it
        assert list(checkpoint) == ["model.layers.0.mlp.up_proj.weight"]
        assert checkpoint.method == "compressed-tensors"
        value = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    torch.testing.assert_close(value, weight.float(), rtol=0.2, atol=0.5)
    assert torch.equal(value.to(decoded.dtype), decoded)
