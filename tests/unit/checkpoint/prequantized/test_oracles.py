"""The reader against those who define the formats: transformers, and compressed-tensors.

Both decode whole tensors. transformers' operations are compared where they are right: FP8 whose
sizes are multiples of the block. compressed-tensors quantizes and decodes by itself; where it is
not installed, its tests are skipped.
"""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from prequantized import compressed, write_folder, write_plain, write_tensors
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from moe_qlora.checkpoint import prequantized
from moe_qlora.checkpoint.prequantized import open_plain

SQUARE = {"block": (8, 8)}
WHOLE = {
    "qwen3_moe": ("qwen3_moe", "fp8", {}, SQUARE),
    "deepseek_v3 e8m0": ("deepseek_v3", "fp8", {}, {**SQUARE, "scale_dtype": "e8m0"}),
    "qwen3_moe mxfp8": ("qwen3_moe", "mxfp8", {"moe_intermediate_size": 96}, {}),
    "deepseek_v4": ("deepseek_v4", "deepseek-v4", {"moe_intermediate_size": 96}, SQUARE),
    "gpt_oss": ("gpt_oss", "mxfp4", {}, {}),
}


def as_plain(folder: Path, to: Path) -> Path:
    """The 16-bit folder that a folder stands for, written by way of the reader."""
    with open_plain(folder) as checkpoint:
        write_plain(to, folder, {key: checkpoint.read(key) for key in checkpoint})
    return to


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_is_the_one_that_transformers_dequantizes(name, tmp_path):
    model_type, method, overrides, options = WHOLE[name]
    folder, _ = write_folder(tmp_path / "base", model_type, method, overrides=overrides, **options)
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    if method == "mxfp4":
        config = Mxfp4Config(dequantize=True)
    load = AutoModelForCausalLM.from_pretrained
    stock = load(folder, quantization_config=config, dtype=torch.bfloat16)
    ours = load(as_plain(folder, tmp_path / "plain"), dtype=torch.bfloat16)
    parameters = dict(stock.named_parameters())
    assert parameters.keys() == dict(ours.named_parameters()).keys()
    for key, value in ours.named_parameters():
        assert torch.equal(parameters[key], value), key


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
    with open_plain(folder) as checkpoint:
        assert list(checkpoint) == ["model.layers.0.mlp.up_proj.weight"]
        assert checkpoint.method == "compressed-tensors"
        value = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    torch.testing.assert_close(value, weight.float(), rtol=0.2, atol=0.5)
    assert torch.equal(value.to(decoded.dtype), decoded)


def test_the_faults_that_are_written_up_are_there(tmp_path, capsys):
    """Each reproduction in UPSTREAM.md runs alone, and prints what is said to be seen."""
    text = (Path(prequantized.__file__).parent / "UPSTREAM.md").read_text(encoding="utf-8")
    programs = re.findall(
        r"```python\n(import.*?)```\n.*?\*\*Seen\.\*\*.*?```\n(.*?)```", text, re.S
    )
    assert len(programs) == 2
    for program, seen in programs:
        if "compressed_tensors" in program and find_spec("compressed_tensors") is None:
            continue
        (tmp_path / "program.py").write_text(program)
        capsys.readouterr()
        runpy.run_path(str(tmp_path / "program.py"))
        printed = capsys.readouterr().out
        if "compressed_tensors" in program:  # whose weights are drawn at random
            ratio, scale = map(int, re.findall(r"\d+", printed))
            assert 0.9 < ratio / scale < 1.1
        else:
            assert printed == seen
