"""Folders whose codes and scales do not belong together, and formats that are not read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from prequantized import compressed, write_tensors
from safetensors.torch import load_file, save_file

from moe_qlora.checkpoint.prequantized import PrequantizedCheckpoint, maker_method, open_plain
from moe_qlora.checkpoint.reader import Checkpoint
from moe_qlora.errors import CheckpointError

EXPERT = "model.layers.1.mlp.experts.2.up_proj"
V4 = "model.layers.1.ffn.experts.2.w1"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def change(folder: Path, to: Path, key: str, make) -> Path:
    """A copy of a folder in which one tensor is another, or is not (None)."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        if key in tensors:
            tensor = make(tensors.pop(key))
            index = next(to.glob("*.index.json"))
            if tensor is None:
                content = json.loads(index.read_text())
                del content["weight_map"][key]
                index.write_text(json.dumps(content))
            else:
                tensors[key] = tensor.contiguous()
            save_file(tensors, file, {"format": "pt"})
            return to
    raise AssertionError(f"{folder} has no {key}")


def lacks(tensor):
    return None


def cast(dtype):
    return lambda tensor: tensor.to(dtype)


U8, FP8, ONE, PACKED = (
    torch.uint8,
    torch.float8_e4m3fn,
    f"{EXPERT}.weight",
    f"{EXPERT}.weight_packed",
)
SCALE, INVERSE, GLOBAL = f"{ONE}_scale", f"{ONE}_scale_inv", f"{ONE}_global_scale"

# by folder: key, what becomes of it, what the message says besides the key
PARTS = {
    "qwen3_moe fp8": [
        (INVERSE, lacks, rf"{ONE} is float8_e4m3fn"),
        (ONE, lacks, f"{INVERSE} is .* a part"),
        (ONE, cast(torch.bfloat16), "is missing, or does not go"),
        (ONE, cast(torch.float8_e4m3fnuz), "float8_e4m3fnuz|belongs to"),
        (ONE, lambda t: t[0], "wanted is codes of shape"),
        (INVERSE, lambda t: t[:2], r"wanted .* shape \(3, 3\)"),
        (INVERSE, lambda t: t.repeat(2, 1), r"shape \(6, 3\)"),
        (INVERSE, lambda t: t.flatten(), r"shape \(9,\)"),
        (INVERSE, lambda t: t[0, 0], r"shape \(\)"),
        (INVERSE, cast(torch.int32), "is int32"),
        (INVERSE, cast(FP8), "is float8_e4m3fn"),
    ],
    "glm4_moe fp8 channel": [
        (SCALE, lambda t: t[:1], r"wanted .* \(40, 1\)"),
        (SCALE, lambda t: t.t(), r"shape \(1, 40\)"),
    ],
    "glm4_moe fp8 tensor": [(SCALE, lambda t: t.repeat(40), r"shape \(40,\)")],
    "deepseek_v3 int4": [
        (SCALE, lacks, f"{SCALE} is missing"),
        (f"{ONE}_shape", lacks, f"{ONE}_shape is missing"),
        (PACKED, lacks, "is missing, or does not go"),
        (PACKED, lambda t: t[:, 1:], r"int32 of shape \(96, 8\)"),
        (PACKED, lambda t: t[1:], r"shape \(95, 2\)"),
        (PACKED, cast(torch.int64), "is int64"),
        (PACKED, cast(U8), "float, 4 bits"),
        (SCALE, lambda t: t[:, :1], r"\(96, 32\)"),
    ],
    "deepseek_v3 int4 channel": [
        (f"{ONE}_shape", lambda t: t + 8, r"\(50, 72\)"),
        (f"{ONE}_shape", lambda t: t[0], "no shape of a weight"),
    ],
    "gpt_oss mxfp4": [
        (f"{STACK}_scales", lacks, f"{STACK}_scales is missing"),
        (f"{STACK}_blocks", lacks, "is missing, or does not go"),
        (f"{STACK}_scales", lambda t: t[:, 1:], r"fnu of shape \(4, 192, 2\)"),
        (f"{STACK}_blocks", lambda t: t[0], r"experts, rows, groups, 16"),
        (f"{STACK}_blocks", lambda t: t[..., 1:], r"experts, rows, groups, 16"),
        (f"{STACK}_scales", cast(torch.float32), "is float32"),
    ],
    "qwen3_moe nvfp4": [
        (GLOBAL, lacks, "weight_global_scale is missing"),
        (SCALE, lacks, f"{SCALE} is missing"),
        (SCALE, lambda t: t.view(U8), "is uint8"),
        (SCALE, lambda t: t[:, 1:], r"wanted .* \(48, 4\)"),
        (GLOBAL, lambda t: t.repeat(2), "one floating"),
    ],
    "qwen3_moe modelopt nvfp4": [
        (f"{SCALE}_2", lacks, "weight_scale_2 is missing"),
        (SCALE, lacks, f"{ONE} is uint8"),
    ],
    "qwen3_moe modelopt fp8": [(SCALE, lacks, f"{ONE} is float8")],
    "deepseek_v4 fp4": [
        (f"{V4}.scale", lacks, f"{V4}.weight is int8"),
        (f"{V4}.scale", lambda t: t[:, 1:], r"wanted .* \(96, 2\)"),
        (f"{V4}.scale", cast(torch.float32), "is float32"),
        (f"{V4}.weight", lambda t: t.view(U8), r"is uint8 .* does not go with it in fp8"),
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
    assert message.startswith(f"{folder}: ")
    assert key in message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_shape_that_groups_contradict_is_named_when_it_is_read(folders, tmp_path):
    """Shapes of thousands of experts are not read in advance."""
    key = f"{EXPERT}.weight_shape"
    folder = change(folders["deepseek_v3 int4"][0], tmp_path / "damaged", key, lambda t: t.flip(0))
    with open_plain(folder) as checkpoint, pytest.raises(CheckpointError, match=key):
        checkpoint.read(f"{EXPERT}.weight")


CODES = {"a.weight": torch.zeros(4, 32).to(FP8), "a.weight_scale": torch.ones(())}
GPTQ = {"a.qweight": torch.zeros(4, 4, dtype=torch.int32), "a.scales": torch.ones(1, 4)}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def with_group(**weights):
    return compressed("pack-quantized", {**INT4, **weights}, [])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "says gptq"),
        ({"quant_method": "awq"}, "says awq"),
        ({"quant_method": "auto-round"}, "says auto-round"),
        ({"quant_method": "fbgemm_fp8"}, "says fbgemm_fp8"),
        ({"quant_method": "quark"}, "says quark"),
        ({"bits": 4}, "says no quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        (with_group(symmetric=False), r"group_0\.weights\.symmetric False"),
        (with_group(actorder="group"), r"group_0\.weights\.actorder 'group'"),
        (with_group(actorder="random"), r"group_0\.weights\.actorder 'random'"),
        (with_group(num_bits=3), r"group_0\.weights\.num_bits 3"),
        (with_group(strategy="tensor_group"), "'tensor_group', .*of 4 bits of type int"),
        (with_group(strategy="token"), r"group_0\.weights\.strategy 'token'"),
        (with_group(group_size=0), "group_size 0"),
        (with_group(strategy="block", block_structure="16xa"), r"block_structure\.1 'a'"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 1}}, "config_groups.g 1"),
        ({**with_group(), "ignore": "lm_head"}, "ignore 'lm_head'"),
        ({**with_group(), "ignore": ["re:("]}, "no regular expression"),
        ({**with_group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**with_group(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size\.1 \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size\.1 0"),
        ({"quant_method": "fp8", "weight_block_size": [128, True]}, r"weight_block_size\.1 True"),
        ({"quant_method": "fp8", "modules_to_not_convert": [1]}, "modules_to_not_convert"),
    ],
)
def test_a_format_that_is_not_read_is_named_with_a_tensor(tmp_path, config, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        open_plain(write_tensors(tmp_path / "base", config, GPTQ))
    assert "a.qweight is one of its tensors" in str(caught.value)
    assert str(caught.value).count("\n") == 0


STACKED = {
    "a_blocks": torch.zeros(1, 2, 1, 16, dtype=U8),
    "a_scales": torch.zeros(1, 2, 1, dtype=U8),
}
PAIR = {"a.weight_packed": torch.zeros(4, 4, dtype=torch.int32), "a.weight_scale": torch.ones(4, 1)}
TENSOR = {"quant_method": "fp8", "weight_block_size": None}
EXPERTS = with_group()
EXPERTS["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
UNSAID = r"\S* is .*no quantization_config that says how"


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        *(
            (TENSOR, {**CODES, key: torch.ones(32, dtype=torch.int32)}, f"{re.escape(key)}.*{said}")
            for key, said in (
                ("a.weight_g_idx", "reordered by activation"),
                ("a.qweight", "GPTQ and AWQ"),
                ("a.pre_quant_scale", "as AWQ does"),
            )
        ),
        (None, CODES, f"a.weight{UNSAID}"),
        (None, {"a.weight": torch.zeros(2, 2).to(torch.float8_e5m2)}, f"a.weight{UNSAID}"),
        (None, STACKED, f"a_blocks{UNSAID}"),
        (None, PAIR, f"a.weight_packed{UNSAID}"),
        (
            EXPERTS,
            PAIR | {"a.weight_shape": torch.tensor([4, 32])},
            r"a\.weight_packed holds codes.*no group of it",
        ),
        (with_group(), CODES, r"a\.weight holds codes \(float, 8 bits\).*int, 4"),
        (
            {"quant_method": "mxfp4"},
            STACKED | {"a": torch.zeros(1, 32, 2)},
            "a is stored twice, once as a_blocks",
        ),
    ],
)
def test_a_tensor_that_the_configuration_does_not_go_with_is_named(tmp_path, config, tensors, said):
    with pytest.raises(CheckpointError, match=said):
        open_plain(write_tensors(tmp_path / "base", config, tensors))


def test_a_folder_of_gguf_files_is_named(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model-Q4_K_M\.gguf, GGUF, which is never read"):
        open_plain(tmp_path)


def test_plain_folders_are_checkpoints_as_they_were(tmp_path):
    tensors = {"a.weight": torch.ones(3, 2), "a.mask": torch.zeros(2, dtype=torch.uint8)}
    for number, config in enumerate(
        [None, {}, {"load_in_4bit": True, "quant_method": "bitsandbytes"}]
    ):
        folder = write_tensors(tmp_path / str(number), config, tensors)
        with open_plain(folder) as checkpoint:
            assert type(checkpoint) is Checkpoint
            assert set(checkpoint) == set(tensors)
            assert torch.equal(
                checkpoint.read("a.weight", 1, 2, device="cpu"), tensors["a.weight"][1:2]
            )
            assert checkpoint.read("a.weight", device="meta").device.type == "meta"


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


def test_files_are_closed_where_a_folder_is_refused(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Checkpoint, "close", lambda self: closed.append(self))
    with pytest.raises(CheckpointError):
        open_plain(write_tensors(tmp_path / "base", {"quant_method": "gptq"}, GPTQ))
    assert len(closed) == 1
    assert not isinstance(closed[0], PrequantizedCheckpoint)
