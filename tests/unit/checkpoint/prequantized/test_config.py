"""Groups of a configuration; parts that do not fit, formats not read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from folders import same
from prequantized import (
    compressed,
    encode_fp8,
    encode_int,
    write_shards,
    write_tensors,
)
from safetensors.torch import load_file

from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.checkpoint.prequantized import maker_method, open_plain
from moe_qlora.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.3.up_proj"
HEAD = "lm_head"
FP8, U8 = torch.float8_e4m3fn, torch.uint8


def weight(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group(target: str, **weights):
    made = compressed("pack-quantized", weights, [])["config_groups"]["group_0"]
    return {**made, "targets": [target]}


def assert_decodes(folder, config, encoded, **plain):
    """Store what is encoded, by module, and read its values."""
    tensors = {f"{module}.weight": tensor for module, tensor in plain.items()}
    for module, (parts, _) in encoded.items():
        tensors |= {f"{module}.weight{end}": tensor for end, tensor in parts.items()}
    with open_plain(write_tensors(folder, config, tensors)) as checkpoint:
        for module, (_, values) in encoded.items():
            assert same(checkpoint.read(f"{module}.weight"), values.to(torch.bfloat16)), module
        for module, tensor in plain.items():
            assert not checkpoint.is_dequantized(f"{module}.weight")
            assert same(checkpoint.read(f"{module}.weight"), tensor)


def test_groups_of_several_kinds(tmp_path):
    """FP8 attention, INT4 experts and INT8 for one module by name, as mixed folders have it."""
    config, four = compressed("mixed-precision", {}, [HEAD]), UP.replace("3", "4")
    channel = {"num_bits": 8, "strategy": "channel"}
    config["config_groups"] = {
        "all": group("Linear", type="int", **channel),
        "attention": group("re:.*self_attn.*", type="float", **channel),
        "experts": group("re:.*experts.*", num_bits=4, type="int", strategy="group", group_size=32),
        "one": group(four, num_bits=8, type="int", strategy="group", group_size=16),
    }
    encoded = {
        Q: encode_fp8(weight(0, 24, 32), (1, 32), "_scale"),
        UP: encode_int(weight(1, 24, 64), 4, 32),
        four: encode_int(weight(2, 24, 64), 8, 16),
        "model.other": encode_int(weight(3, 24, 60), 8, None),
    }
    assert_decodes(tmp_path, config, encoded, lm_head=weight(4, 8, 8).bfloat16())


def test_what_lies_on_disk_decides(tmp_path):
    """A list that names more than the maker left out does not turn codes into weights."""
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    config["modules_to_not_convert"] = ["proj"]
    assert_decodes(tmp_path, config, {Q: encode_fp8(weight(0, 24, 32), (8, 8), "_scale_inv")})


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
V4 = "model.layers.1.ffn.experts.2.w1"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def change(folder: Path, to: Path, key: str, make) -> Path:
    """A copy of a folder in which one tensor is another, or is not (None)."""
    shutil.copytree(folder, to)
    tensors = {k: t for file in to.glob("*.safetensors") for k, t in load_file(file).items()}
    tensor = make(tensors.pop(key))
    for file in to.glob("*.safetensors"):
        file.unlink()
    write_shards(to, tensors if tensor is None else tensors | {key: tensor.contiguous()}, 3)
    return to


def lacks(tensor):
    return None


def cast(dtype):
    return lambda tensor: tensor.to(dtype)


ONE, PACKED = f"{EXPERT}.weight", f"{EXPERT}.weight_packed"
SCALE, INVERSE, GLOBAL = f"{ONE}_scale", f"{ONE}_scale_inv", f"{ONE}_global_scale"

# by folder: key, what becomes of it, what the message says
ALONE = "is missing, or does not go"
PARTS = {
    "qwen3_moe fp8": [
        (INVERSE, lacks, rf"{ONE} is float8_e4m3fn.*{INVERSE}"),
        (ONE, lacks, f"{INVERSE} is .* a part"),
        (ONE, cast(torch.bfloat16), f"{INVERSE} .*{ALONE}"),
        (ONE, lambda t: t[0], "wanted is codes of shape"),
        (INVERSE, lambda t: t[:2], r"wanted .* shape \(3, 3\)"),
        (INVERSE, cast(torch.int32), "is int32"),
    ],
    "glm4_moe fp8 channel": [
        (SCALE, lambda t: t[:1], r"wanted .* \(40, 1\)"),
    ],
    "glm4_moe fp8 tensor": [(SCALE, lambda t: t.repeat(40), r"shape \(40,\)")],
    "deepseek_v3 int4": [
        (SCALE, lacks, f"{SCALE} is missing"),
        (PACKED, lambda t: t[:, 1:], "int32 of codes"),
        (SCALE, lambda t: t[:, :1], "int32 of codes"),
    ],
    "deepseek_v3 int4 channel": [
        (f"{ONE}_shape", lacks, f"{ONE}_shape is missing"),
        (f"{ONE}_shape", lambda t: t + 8, f"{ONE}_shape go with"),
    ],
    "gpt_oss mxfp4": [
        (f"{STACK}_scales", lacks, f"{STACK}_scales is missing"),
        (f"{STACK}_scales", lambda t: t[:, 1:], r"fnu of shape \(4, 192, 2\)"),
        (f"{STACK}_blocks", lambda t: t[0], r"experts, rows, groups, 16"),
    ],
    "qwen3_moe nvfp4": [
        (GLOBAL, lacks, "weight_global_scale is missing"),
        (GLOBAL, lambda t: t.repeat(2), "one floating"),
    ],
    "qwen3_moe modelopt nvfp4": [
        (f"{SCALE}_2", lacks, "weight_scale_2 is missing"),
    ],
    "deepseek_v4 fp4": [
        (f"{V4}.scale", lacks, f"{V4}.weight is int8.*scale"),
        (f"{V4}.weight", lambda t: t.view(U8), r"does not go with it in fp8"),
    ],
}


@pytest.mark.parametrize(
    ("name", "key", "make", "said"),
    [(name, *part) for name, parts in PARTS.items() for part in parts],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_a_part_that_is_missing_or_foreign_is_named(folders, tmp_path, name, key, make, said):
    folder = change(folders[name][0], tmp_path / "damaged", key, make)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_plain(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}: {key.rpartition('.')[0]}")
    assert message.endswith(".")
    assert "\n" not in message


CODES = {"a.weight": torch.zeros(4, 32).to(FP8), "a.weight_scale": torch.ones(())}
GPTQ = {"a.qweight": torch.zeros(4, 4, dtype=torch.int32), "a.scales": torch.ones(1, 4)}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def with_group(**weights):
    return compressed("pack-quantized", {**INT4, **weights}, [])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "says gptq"),
        ({"bits": 4}, "says no quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (with_group(symmetric=False), r"group_0\.weights\.symmetric False"),
        (with_group(num_bits=3), r"group_0\.weights\.num_bits 3"),
        (with_group(strategy="block", block_structure="16xa"), r"block_structure\.1 'a'"),
        ({**with_group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**with_group(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size\.1 \[128\]"),
    ],
)
def test_a_format_that_is_not_read_is_named(tmp_path, monkeypatch, config, said):
    closed = []
    monkeypatch.setattr(Checkpoint, "close", lambda self: closed.append(type(self)))
    with pytest.raises(CheckpointError, match=said) as caught:
        open_plain(write_tensors(tmp_path / "base", config, GPTQ))
    assert str(caught.value).count("\n") == 0 and closed == [Checkpoint]


STACK_OF_ONE = {"a_blocks": torch.zeros(1, 2, 1, 16, dtype=U8)}
STACK_OF_ONE["a_scales"] = torch.zeros(1, 2, 1, dtype=U8)


def test_a_weight_that_is_stored_twice_is_named(tmp_path):
    tensors = {**STACK_OF_ONE, "a": torch.zeros(1, 32, 2)}
    with pytest.raises(CheckpointError, match="a is stored twice, once as a_blocks"):
        open_plain(write_tensors(tmp_path / "a", {"quant_method": "mxfp4"}, tensors))


@pytest.mark.parametrize("tensors", [CODES, {"a.weight": CODES["a.weight"]}, STACK_OF_ONE])
def test_codes_without_a_configuration_are_named(tmp_path, tensors):
    with pytest.raises(CheckpointError, match=r"a\S* is .*no quantization_config that says how"):
        open_plain(write_tensors(tmp_path, None, tensors))


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_method": "bitsandbytes"}, None),
        ({"load_in_8bit": True}, None),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "modelopt_fp4"}, "modelopt"),
    ],
)
def test_the_method_of_a_configuration(said, method):
    assert maker_method({"quantization_config": said}) == method
    assert maker_method({"text_config": {"quantization_config": said}}) == method
    assert maker_method({}) is None
    with pytest.raises(CheckpointError, match="quantization_config says 'fp8'"):
        maker_method({"quantization_config": "fp8"})
