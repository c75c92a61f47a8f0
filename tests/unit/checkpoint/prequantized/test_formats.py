"""Single tensors of every format at odd sizes, against products written out one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from folders import same
from prequantized import compressed, write_shards

from moe_qlora.checkpoint.prequantized import open_plain
from moe_qlora.errors import CheckpointError


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def e4m3(code: int) -> float:
    """The value of a byte, by the definition: 1 bit of sign, 4 of exponent (bias 7), 3."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = [e4m3(code) for code in range(256)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def f32(*factors: float) -> float:
    """A product in fp32, from the left."""
    product = torch.tensor(factors[0], dtype=torch.float32)
    for factor in factors[1:]:
        product = product * torch.tensor(factor, dtype=torch.float32)
    return float(product)


def fp8_codes(*shape: int) -> torch.Tensor:
    """Bytes of every value but NaN."""
    codes = torch.randint(0, 256, shape, generator=generator(), dtype=torch.uint8)
    return codes.where((codes & 127) != 127, 5)


def product(codes: torch.Tensor, scale_of) -> torch.Tensor:
    """The plain matrix: each code's value times the scale of its place, in bf16."""
    rows = [
        [f32(E4M3[code], scale_of(row, column)) for column, code in enumerate(line)]
        for row, line in enumerate(codes.tolist())
    ]
    return torch.tensor(rows).to(torch.bfloat16)


def write(folder: Path, config, tensors, **more) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    content = {"dtype": "bfloat16", **more, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content))
    write_shards(folder, {key: tensor.contiguous() for key, tensor in tensors.items()})
    return folder


def read(folder: Path, key: str = "a.weight") -> torch.Tensor:
    with open_plain(folder) as checkpoint:
        assert list(checkpoint) == [key]
        value = checkpoint.read(key)
        middle = value.shape[0] // 3
        assert same(checkpoint.read(key, middle, middle + 2), value[middle : middle + 2].clone())
        return value


def fp8(block) -> dict:
    return {"quant_method": "fp8", "weight_block_size": block}


SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8]


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("name", ["a.weight_scale_inv", "a.scale", "a.qscale_weight"])
def test_blocks_are_cut_off_at_the_edges(tmp_path, name, dtype):
    """Rows and columns of DeepSeek-V3's kv_a, 576 x 7168 in blocks of 128, but eight times less."""
    codes = fp8_codes(72, 50)
    exponents = torch.randint(110, 135, (5, 4), generator=generator(), dtype=torch.uint8)
    scale = torch.rand(5, 4, generator=generator()).to(torch.float32) + 0.01
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        stored = exponents.view(dtype)
        values = [[2.0 ** (byte - 127) for byte in line] for line in exponents.tolist()]
    else:
        stored = scale.to(dtype)
        values = stored.float().tolist()
    tensors = {"a.weight": codes.view(torch.float8_e4m3fn), name: stored}
    value = read(write(tmp_path, fp8([16, 16]), tensors))
    assert same(value, product(codes, lambda row, column: values[row // 16][column // 16]))


@pytest.mark.parametrize("rows", [159, 160, 255, 256, 257])
def test_a_grid_of_another_number_of_rows_is_refused(tmp_path, rows):
    codes = fp8_codes(rows, 32).view(torch.float8_e4m3fn)
    for count in range(1, 5):
        scale = torch.ones(count, 1)
        tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
        folder = write(tmp_path / str(count), fp8([128, 128]), tensors)
        if count == -(-rows // 128):
            assert torch.equal(read(folder), codes.to(torch.bfloat16))
        else:
            with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv is .* of shape|belong"):
                open_plain(folder)


@pytest.mark.parametrize(
    ("block", "shape", "place"),
    [
        (None, (), lambda e, r, c: ()),
        (None, (1,), lambda e, r, c: (0,)),
        (None, (3,), lambda e, r, c: (e,)),
        (None, (3, 1, 1), lambda e, r, c: (e, 0, 0)),
        (None, (3, 7), lambda e, r, c: (e, r)),
        (None, (3, 7, 1), lambda e, r, c: (e, r, 0)),
        ([4, 3], (3, 2, 4), lambda e, r, c: (e, r // 4, c // 3)),
        ([1, 5], (3, 7, 2), lambda e, r, c: (e, r, c // 5)),
        ([16, 16], (3, 1, 1), lambda e, r, c: (e, 0, 0)),
    ],
)
def test_stacks_of_experts(tmp_path, block, shape, place):
    codes = fp8_codes(3, 7, 10)
    scale = torch.rand(shape, generator=generator()) + 0.1
    tensors = {"x.gate_up_proj": codes.view(torch.float8_e4m3fn), "x.gate_up_proj_scale_inv": scale}
    value = read(write(tmp_path, fp8(block), tensors), "x.gate_up_proj")
    for expert in range(3):
        wanted = product(codes[expert], lambda r, c, e=expert: float(scale[place(e, r, c)]))
        assert same(value[expert], wanted)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_is_the_value_that_torch_has_for_it(tmp_path, dtype):
    """-0, subnormals, infinities and NaN among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
    folder = write(tmp_path, fp8(None), {"a.weight": codes, "a.weight_scale": torch.ones(())})
    with open_plain(folder) as checkpoint:
        value = checkpoint.read("a.weight")
    wanted = codes.float()
    assert torch.equal(value.isnan(), wanted.isnan())
    value, wanted = (tensor.masked_fill(wanted.isnan(), 7.0) for tensor in (value, wanted))
    assert same(value, wanted.to(torch.bfloat16))
    if dtype == torch.float8_e4m3fn:
        assert value.flatten().tolist() == [7.0 if math.isnan(v) else v for v in E4M3]


def nibbles(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (rows, columns), and the bytes that they are packed in."""
    codes = torch.randint(0, 16, shape, generator=generator(), dtype=torch.uint8)
    return codes, codes[..., 0::2] | codes[..., 1::2] << 4


def test_mxfp4_of_gpt_oss_is_transposed(tmp_path):
    codes, packed = nibbles(2, 5, 3, 32)
    scales = torch.randint(115, 130, (2, 5, 3), generator=generator(), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 254], dtype=torch.uint8)  # 2^-127 is subnormal in fp32
    folder = write(
        tmp_path,
        {"quant_method": "mxfp4"},
        {"e.down_proj_blocks": packed, "e.down_proj_scales": scales},
    )
    value = read(folder, "e.down_proj")
    assert value.shape == (2, 96, 5)
    assert value.is_contiguous()
    for expert in range(2):
        for row in range(5):
            for column in range(96):
                place = expert, row, column // 32
                one = E2M1[codes[*place, column % 32]] * 2.0 ** (int(scales[place]) - 127)
                wanted = torch.tensor(one, dtype=torch.float64).float().to(torch.bfloat16)
                assert same(value[expert, column, row], wanted)


def test_a_scale_that_is_no_number_makes_no_numbers(tmp_path):
    scales = torch.full((1, 2, 1), 127, dtype=torch.uint8)
    scales[0, 1] = 255
    codes = torch.full((1, 2, 1, 16), 0x22, dtype=torch.uint8)
    folder = write(tmp_path, {"quant_method": "mxfp4"}, {"e_blocks": codes, "e_scales": scales})
    with open_plain(folder) as checkpoint:
        value = checkpoint.read("e")
    assert bool((value[0, :, 0] == 1).all())
    assert bool(value[0, :, 1].isnan().all())


def test_fp4_of_deepseek_v4(tmp_path):
    codes, packed = nibbles(5, 64)
    scale = torch.randint(115, 130, (5, 2), generator=generator(), dtype=torch.uint8)
    tensors = {"a.weight": packed.view(torch.int8), "a.scale": scale.view(torch.float8_e8m0fnu)}
    value = read(write(tmp_path, fp8([128, 128]), tensors))
    for row in range(5):
        for column in range(64):
            one = E2M1[codes[row, column]] * 2.0 ** (int(scale[row, column // 32]) - 127)
            assert same(value[row, column], torch.tensor(one).to(torch.bfloat16))


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
def test_nvfp4_scales_have_a_scale(tmp_path, maker):
    """One divides, the other multiplies; each is applied to the scales first."""
    codes, packed = nibbles(6, 48)
    scale_codes = fp8_codes(6, 3) & 127
    scale = scale_codes.view(torch.float8_e4m3fn)
    one = torch.tensor([3.7])
    if maker == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": one.reshape(())}
        tensors["a.input_scale"] = torch.tensor(0.5)
    else:
        config = compressed("nvfp4-pack-quantized", NVFP4, [])
        tensors = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_global_scale": one}
        tensors["a.input_global_scale"] = torch.tensor([0.5])
    value = read(write(tmp_path, config, tensors))
    for row in range(6):
        for column in range(48):
            own = torch.tensor(E4M3[scale_codes[row, column // 16]])
            own = own * one if maker == "modelopt" else own / one
            assert same(value[row, column], (E2M1[codes[row, column]] * own)[0].to(torch.bfloat16))


@pytest.mark.parametrize(("rows", "columns", "group"), [(5, 96, 32), (3, 50, None), (4, 8, 8)])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_words(tmp_path, bits, rows, columns, group):
    """Bits of a row are one number, whose lowest ones are the first code's."""
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (rows, columns), generator=generator())
    words = torch.zeros(rows, -(-columns * bits // 32), dtype=torch.int64)
    for row in range(rows):
        number = sum((int(code) + top) << (bits * i) for i, code in enumerate(codes[row]))
        for word in range(words.shape[1]):
            words[row, word] = (number >> (32 * word)) & 0xFFFFFFFF
    packed = words.where(words < 2**31, words - 2**32).to(torch.int32)
    scale = torch.rand(rows, columns // group if group else 1, generator=generator())
    weights = {"num_bits": bits, "type": "int", "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    tensors = {"a.weight_packed": packed, "a.weight_scale": scale}
    tensors["a.weight_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    value = read(write(tmp_path, compressed("pack-quantized", weights, []), tensors))
    wanted = codes.float() * scale.repeat_interleave(group or columns, 1)
    assert same(value, wanted.to(torch.bfloat16))


def test_modelopt_keeps_dimensions_of_one_between(tmp_path):
    codes = fp8_codes(200, 130).view(torch.float8_e4m3fn)
    scale = torch.rand(2, 1, 2, 1, generator=generator())
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    value = read(write(tmp_path, config, {"a.weight": codes, "a.weight_scale": scale}))
    grid = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    assert same(value, (codes.float() * grid).to(torch.bfloat16))


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    codes = fp8_codes(4, 6).view(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(0.5)}
    folder = write(tmp_path, None, tensors)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        open_plain(folder)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert same(read(folder), (codes.float() / 2).to(torch.bfloat16))


def test_modelopt_may_have_quantized_the_cache_only(tmp_path):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    folder = write(tmp_path, None, {"a.weight": weight, "a.k_scale": torch.ones(1)})
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with open_plain(folder) as checkpoint:
        assert same(checkpoint.read("a.weight"), weight)


@pytest.mark.parametrize("shape", [(2, 2), (), (200, 1)])
def test_without_a_block_size_transformers_and_vllm_have_their_own(tmp_path, shape):
    codes = fp8_codes(200, 130).view(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator())
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
    value = read(write(tmp_path, {"quant_method": "fp8"}, tensors))
    if shape == (2, 2):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    assert same(value, (codes.float() * scale).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn"}, torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_the_configuration(tmp_path, config, dtype):
    codes = fp8_codes(4, 6).view(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(0.3)}
    folder = write(tmp_path, fp8(None), tensors, **config)
    assert same(read(folder), (codes.float() * 0.3).to(dtype))
    with open_plain(folder, dtype=torch.float32) as checkpoint:
        assert same(checkpoint.read("a.weight"), codes.float() * torch.tensor(0.3))


def test_files_and_a_configuration_may_be_given(tmp_path):
    codes = fp8_codes(4, 6).view(torch.float8_e4m3fn)
    folder = write(tmp_path, None, {"a.weight": codes, "a.weight_scale": torch.tensor(0.3)})
    files = sorted(folder.glob("*.safetensors"))
    with open_plain(folder, files=files, quantization_config=fp8(None)) as checkpoint:
        assert same(checkpoint.read("a.weight"), (codes.float() * 0.3).to(torch.bfloat16))
        assert checkpoint.files == tuple(files)
