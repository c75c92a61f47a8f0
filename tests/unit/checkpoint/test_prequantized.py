"""Folders that their makers quantized: tensors, rows, parts that do not fit, formats not read.

Values are compared with the formats' definitions, and with compressed-tensors, which decodes whole
tensors, where it is installed.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import same, tensors
from prequantized import (
    CASES,
    Stored,
    compressed,
    encode_fp8,
    encode_int,
    write_both,
    write_case,
    write_shards,
    write_tensors,
)
from safetensors.torch import load_file
from small_models import fill
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import NF4
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import local_torch_dtype
from typer.testing import CliRunner

import moe_qlora
from moe_qlora.checkpoint import prequantized as makers
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.checkpoint.prequantized import PrequantizedCheckpoint, open_plain
from moe_qlora.checkpoint.verify import verify
from moe_qlora.cli.app import app
from moe_qlora.detection.detect import detect
from moe_qlora.errors import CheckpointError
from moe_qlora.testing import tiny_inputs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Stored]]:
    """By the name in `CASES`: the folder, and the plain tensors that it stands for."""
    root = tmp_path_factory.mktemp("makers")
    return {name: write_case(root / name.replace(" ", "_"), name) for name in CASES}


Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.3.up_proj"
FP8, U8 = torch.float8_e4m3fn, torch.uint8


def weight(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_groups_of_several_kinds(tmp_path):
    """FP8 attention, INT4 experts and INT8 for one module by name; what is stored decides."""
    config, four = compressed("mixed-precision", {}), UP.replace("3", "4")
    channel = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "Linear": {"type": "int", **channel},
        "re:.*self_attn.*": {"type": "float", **channel},
        "re:.*experts.*": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        four: {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16},
    }
    config["config_groups"] = {
        target: {"targets": [target], "weights": weights} for target, weights in groups.items()
    }
    encoded = {
        Q: encode_fp8(weight(0, 24, 32), (1, 32), "_scale"),
        UP: encode_int(weight(1, 24, 64), 4, 32),
        four: encode_int(weight(2, 24, 64), 8, 16),
        "model.other": encode_int(weight(3, 24, 60), 8, None),
    }
    tensors = {"lm_head.weight": weight(4, 8, 8).bfloat16()}
    values = dict(tensors)
    for module, (parts, value) in encoded.items():
        tensors |= {f"{module}.weight{end}": tensor for end, tensor in parts.items()}
        values[f"{module}.weight"] = value.bfloat16()
    with open_plain(write_tensors(tmp_path, config, tensors)) as checkpoint:
        for key, value in values.items():
            assert same(checkpoint.read(key), value), key
        assert not checkpoint.is_dequantized("lm_head.weight")


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
V4 = "model.layers.1.ffn.experts.2.w1"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def change(folder: Path, to: Path, key: str, make) -> Path:
    """A copy of a folder in which one tensor is another, or is not (None)."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    tensor = make(tensors.pop(key))
    write_shards(to, tensors if tensor is None else tensors | {key: tensor.contiguous()}, 3)
    return to


def lacks(tensor):
    return None


ONE, PACKED = f"{EXPERT}.weight", f"{EXPERT}.weight_packed"
SCALE, INVERSE, GLOBAL = f"{ONE}_scale", f"{ONE}_scale_inv", f"{ONE}_global_scale"

ALONE = "is missing, or does not go"
PARTS = [  # folder, key, what becomes of it, what the message says
    ("deepseek_v3 fp8", INVERSE, lacks, rf"{ONE} is float8_e4m3fn.*{INVERSE}"),
    ("deepseek_v3 fp8", ONE, lacks, f"{INVERSE} is .* a part"),
    ("deepseek_v3 fp8", ONE, torch.Tensor.bfloat16, f"{INVERSE} .*{ALONE}"),
    ("deepseek_v3 fp8", INVERSE, lambda t: t[:1], r"wanted .* shape \(3, 3\)"),
    ("deepseek_v3 fp8", INVERSE, torch.Tensor.int, "is int32"),
    ("deepseek_v3 int4", SCALE, lacks, f"{SCALE} is missing"),
    ("deepseek_v3 int4", PACKED, lambda t: t[:, 1:], "int32 of codes"),
    ("gpt_oss mxfp4", f"{STACK}_scales", lacks, f"{STACK}_scales is missing"),
    ("gpt_oss mxfp4", f"{STACK}_scales", lambda t: t[:, 1:], r"fnu of shape \(4, 192, 2\)"),
    ("gpt_oss mxfp4", f"{STACK}_blocks", lambda t: t[0], r"experts, rows, groups, 16"),
    ("qwen3_moe nvfp4", GLOBAL, lacks, "weight_global_scale is missing"),
    ("qwen3_moe nvfp4", GLOBAL, lambda t: t.repeat(2), "one floating"),
    ("deepseek_v4 fp4", f"{V4}.scale", lacks, f"{V4}.weight is int8.*scale"),
    ("deepseek_v4 fp4", f"{V4}.weight", lambda t: t.view(U8), r"does not go with it in fp8"),
]


@pytest.mark.parametrize(("name", "key", "make", "said"), PARTS, ids=map(str, range(len(PARTS))))
def test_a_part_that_is_missing_or_foreign_is_named(folders, tmp_path, name, key, make, said):
    folder = change(folders[name][0], tmp_path / "damaged", key, make)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_plain(folder)
    assert re.fullmatch(rf"{folder}: {key.rpartition('.')[0]}.*\.", str(caught.value))


CODES = {"a.weight": torch.zeros(4, 32).to(FP8), "a.weight_scale": torch.ones(())}
GPTQ = {"a.qweight": torch.zeros(4, 4, dtype=torch.int32), "a.scales": torch.ones(1, 4)}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def with_group(**weights):
    return compressed("pack-quantized", {**INT4, **weights})


CHANNEL = with_group(strategy="channel", group_size=None)
WORDS = {"a_packed": torch.zeros(4, 4, dtype=torch.int32), "a_scale": torch.ones(4, 1)}
STACK_OF_ONE = {"a_blocks": torch.zeros(1, 2, 1, 16, dtype=U8)}
STACK_OF_ONE["a_scales"] = torch.zeros(1, 2, 1, dtype=U8)
UNSAID = r"a\S* is .*no quantization_config that says how"
TWICE = {**STACK_OF_ONE, "a": torch.zeros(1, 32, 2)}


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, GPTQ, "says gptq"),
        ({"bits": 4}, GPTQ, "says no quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, GPTQ, "quant_algo 'W4A8_AWQ'"),
        (with_group(symmetric=False), GPTQ, r"group_0\.weights\.symmetric False"),
        (with_group(num_bits=3), GPTQ, r"group_0\.weights\.num_bits 3"),
        (with_group(strategy="block", block_structure="16xa"), GPTQ, "of another type.*'a'"),
        ({**with_group(), "sparsity_config": {"format": "sparse-24"}}, GPTQ, "sparse-24"),
        ({**with_group(), "transform_config": {"config_groups": {"u": {}}}}, GPTQ, "transform"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, GPTQ, "of another type"),
        (CHANNEL, WORDS, "a_shape is missing"),
        (CHANNEL, {**WORDS, "a_shape": torch.tensor([4, 40])}, "a_shape go with"),
        ({"quant_method": "mxfp4"}, TWICE, "a is stored twice, once as a_blocks"),
        *((None, tensors, UNSAID) for tensors in (CODES, STACK_OF_ONE)),
    ],
)
def test_a_format_that_is_not_read_is_named(tmp_path, monkeypatch, config, tensors, said):
    closed = []
    monkeypatch.setattr(Checkpoint, "close", lambda self: closed.append(type(self)))
    with pytest.raises(CheckpointError, match=said) as caught:
        open_plain(write_tensors(tmp_path / "base", config, tensors))
    assert str(caught.value).count("\n") == 0 and closed[-1:] == [Checkpoint]


BF16, E8M0 = torch.bfloat16, torch.float8_e8m0fnu


def drawn(low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def fp8_codes(*shape: int) -> Tensor:
    """Bytes of every value but NaN."""
    codes = drawn(0, 256, *shape)
    return codes.where((codes & 127) != 127, 5)


def read(folder: Path, key: str = "a.weight") -> Tensor:
    with open_plain(folder) as checkpoint:
        assert list(checkpoint) == [key]
        return checkpoint.read(key)


def fp8(block=None) -> dict:
    return {"quant_method": "fp8", "weight_block_size": block}


F32, EDGES, STACK, ROWS = torch.float32, (72, 50), (3, 7, 10), (200, 130)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
INV = "weight_scale_inv"
# configuration, shape of the codes, block, name, shape and dtype of the scales
GRIDS = [
    # DeepSeek-V3's kv_a, 576 x 7168 in blocks of 128, but eight times less: cut off at the edges
    *((fp8([16, 16]), EDGES, (16, 16), INV, (5, 4), dtype) for dtype in (BF16, U8, E8M0)),
    (fp8([16, 16]), EDGES, (16, 16), "scale", (5, 4), F32),
    (fp8([16, 16]), EDGES, (16, 16), "qscale_weight", (5, 4), torch.float16),
    *((fp8(), STACK, (7, 10), INV, scales, F32) for scales in ((), (3,), (3, 1, 1))),
    (fp8(), STACK, (1, 10), INV, (3, 7), F32),
    (fp8([4, 3]), STACK, (4, 3), INV, (3, 2, 4), F32),
    (fp8([16, 16]), STACK, (7, 10), INV, (3, 1, 1), F32),
    # where no size is given, those of transformers and of vLLM; modelopt keeps dimensions of one
    (MODELOPT, ROWS, (128, 128), "weight_scale", (2, 1, 2, 1), F32),
    (fp8(), ROWS, (128, 128), INV, (2, 2), F32),
    (fp8(), ROWS, ROWS, INV, (), F32),
    (fp8(), ROWS, (1, 130), INV, (200, 1), F32),
    ({"quant_method": "mxfp8"}, ROWS, (1, 32), INV, (200, 5), F32),
]


@pytest.mark.parametrize(("config", "shape", "block", "name", "grid", "dtype"), GRIDS)
def test_fp8_codes_times_their_scales(tmp_path, config, shape, block, name, grid, dtype):
    codes, drawn_scales = fp8_codes(*shape), drawn(110, 135, *grid)
    if dtype in (U8, E8M0):
        stored, values = drawn_scales.view(dtype), torch.pow(2.0, drawn_scales.double() - 127)
    else:
        stored = (drawn_scales / 130).to(dtype)
        values = stored
    tensors = {"a.weight": codes.view(FP8), f"a.{name}": stored}
    value, values = read(write_tensors(tmp_path, config, tensors)), values.float()
    (rows, columns), (high, wide) = shape[-2:], block
    values = values.reshape(-1, -(-rows // high), -(-columns // wide)).repeat_interleave(high, 1)
    values = values[:, :rows].repeat_interleave(wide, 2)[..., :columns]
    plain = codes.view(FP8).float().view(-1, rows, columns) * values
    assert same(value, plain.view(shape).to(BF16))


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_every_byte_is_the_value_that_torch_has_for_it(tmp_path, dtype):
    """-0, subnormals, infinities and NaN among them; of exponents, 255 makes no numbers."""
    codes = torch.arange(256, dtype=U8).view(16, 16).view(dtype)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(())}
    value, wanted = read(write_tensors(tmp_path / "a", fp8(), tensors)), codes.float()
    assert torch.equal(value.isnan(), wanted.isnan())
    assert same(*(t.nan_to_num(7.0, math.inf, -math.inf) for t in (value, wanted.to(BF16))))
    tensors = {"e_blocks": torch.full((1, 4, 1, 16), 0x22, dtype=U8)}
    tensors["e_scales"] = torch.tensor([[[127], [0], [254], [255]]], dtype=U8)
    value = read(write_tensors(tmp_path / "e", {"quant_method": "mxfp4"}, tensors), "e")
    assert value[0, 0, :3].tolist() == [1.0, 2.0**-127, 2.0**127]
    assert bool(value[0, :, 3].isnan().all())


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
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        *(({"dtype": name}, BF16) for name in ("auto", "float8_e4m3fn")),
    ],
)
def test_the_dtype_is_that_of_the_configuration(tmp_path, config, dtype):
    folder = write_tensors(tmp_path, fp8(), TENSORS, **config)
    assert same(read(folder), (SMALL.float() / 2).to(dtype))


def scheme(form: str, bits: int, strategy: str, **more) -> tuple[str, dict]:
    """A format, and how its weights are stored."""
    kind = "int" if "int" in form or form.startswith("pack-") else "float"
    return form, {"num_bits": bits, "type": kind, "strategy": strategy, **more}


EXPONENTS = {"group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES = {
    "int4 group": scheme("pack-quantized", 4, "group", group_size=32),
    "int4 channel": scheme("pack-quantized", 4, "channel"),
    "int8 group": scheme("pack-quantized", 8, "group", group_size=16),
    "int8 plain": scheme("int-quantized", 8, "channel"),
    "fp8 channel": scheme("float-quantized", 8, "channel"),
    "fp8 tensor": scheme("float-quantized", 8, "tensor"),
    "fp8 group": scheme("float-quantized", 8, "group", group_size=32),
    "fp8 block": scheme("float-quantized", 8, "block", block_structure=[16, 32]),
    "mxfp8": scheme("mxfp8-quantized", 8, "group", **EXPONENTS),
    "nvfp4": scheme("nvfp4-pack-quantized", 4, "tensor_group", group_size=16),
    "mxfp4": scheme("mxfp4-pack-quantized", 4, "group", **EXPONENTS),
}


def compressed_parts(form, weights, weight):
    """What compressed-tensors stores for a weight, and what it decodes that to."""
    pytest.importorskip("compressed_tensors")
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
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_is_the_one_that_compressed_tensors_decodes(name, tmp_path):
    form, weights = SCHEMES[name]
    plain = weight(7, 56 if "block" in name else 48, 96).bfloat16()
    stored, decoded = compressed_parts(form, weights, plain)
    tensors = {f"a.{key}": tensor.contiguous() for key, tensor in stored.items()}
    folder = write_tensors(tmp_path, compressed(form, weights), tensors, dtype="float32")
    with open_plain(folder) as checkpoint, local_torch_dtype(torch.bfloat16):  # loads set it
        assert (list(checkpoint), checkpoint.method) == (["a.weight"], "compressed-tensors")
        value = checkpoint.read("a.weight")
    torch.testing.assert_close(value, plain.float(), rtol=0.2, atol=0.5)
    assert torch.equal(value.to(decoded.dtype), decoded)


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_rows_are_those_of_the_plain_folder(folders, name, monkeypatch):
    folder, plain = folders[name]
    with open_plain(folder) as checkpoint:
        assert isinstance(checkpoint, PrequantizedCheckpoint)
        assert set(checkpoint) == set(plain)
        for key, tensor in plain.items():
            info = checkpoint.info(key)
            seen = (info.dtype, info.shape, info.nbytes)
            assert seen == (tensor.dtype, tuple(tensor.shape), tensor.nbytes), key
            assert same(checkpoint.read(key), tensor), key
        with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
            checkpoint.read("model.nothing")
        assert 4 <= sum(checkpoint.is_dequantized(key) for key in checkpoint) < len(plain)
        by_shape = {tensor.shape: key for key, tensor in plain.items()}
        for number, key in enumerate(by_shape.values()):
            # 50 values: less than a row, or one
            small = number % 2 and plain[key].numel() <= 1 << 16
            monkeypatch.setattr(makers, "PIECE", 50 if small else 1 << 22)
            # one row, rows over the edge of a block, none, the last, more than there are
            for place in ((0, 1), (15, 17), (2, 2), (len(plain[key]) - 1, None), (17, 10_000)):
                found = checkpoint.read(key, *place)
                assert same(found, plain[key][slice(*place)].contiguous()), (key, place)


class Largest(TorchDispatchMode):
    """Notes the largest fp32 tensor that operations made."""

    float32 = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.float32 = max(self.float32, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["deepseek_v3 fp8", "gpt_oss mxfp4", "deepseek_v3 int4"])
def test_a_piece_is_in_fp32_at_a_time(folders, name, monkeypatch):
    monkeypatch.setattr(makers, "PIECE", 1024)
    with open_plain(folders[name][0]) as checkpoint:
        for key in filter(checkpoint.is_dequantized, checkpoint):
            info = checkpoint.info(key)
            with Largest() as largest:
                checkpoint.read(key)
            # words and bytes are unpacked whole, which may be a little more than the columns
            assert 0 < largest.float32 <= max(1024, 2 * max(info.shape[-2:])) + 256, key


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_decodes_the_same_bits(folders, name):
    with open_plain(folders[name][0]) as checkpoint:
        for key in checkpoint:
            on_gpu = checkpoint.read(key, 1, device="cuda")
            assert on_gpu.is_cuda
            assert same(on_gpu.cpu(), checkpoint.read(key, 1)), key


# Packing, merging and verifying such folders (`maker`), beside their 16-bit twins (`plain`)

# One of each way to be stored, and of each way from the files to parameters.
FEW = ("deepseek_v3 fp8", "gpt_oss mxfp4", "deepseek_v4 fp4")


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def adapt(root: Path, auto: Any = AutoModelForCausalLM) -> None:
    """A random adapter on experts and one kind of Linear layer, trained by nobody."""
    model: Any = auto.from_pretrained(root / "plain")
    leaves = sorted({param.parameter_name for param in detect(model).experts})
    targets = ["o_proj", "o_b_proj"]
    config: Any = peft.LoraConfig(r=2, target_modules=targets, target_parameters=leaves)
    fill(peft.get_peft_model(model, config), 3, 0.1).save_pretrained(root / "adapter")


def assert_same_merges(root: Path) -> dict[str, Tensor]:
    """Merge into both, compare, and return the tensors; the folders are `merged`, `expected`."""
    for base, name in (("maker", "merged"), ("plain", "expected")):
        places = (root / base, root / "adapter", root / name)
        report = moe_qlora.merge_adapter(*places, max_shard_size="40KB")
        assert bool(report.dequantized) is (base == "maker")
        assert ("all of it is written dequantized" in str(report)) is (base == "maker")
    found, expected = tensors(root / "merged"), tensors(root / "expected")
    assert found.keys() == expected.keys()
    assert all(same(tensor, expected[key]) for key, tensor in found.items())
    configs = [config_of(root / name) for name in ("merged", "expected")]
    assert configs[0] == configs[1] and "quantization_config" not in json.dumps(configs)
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_images_whose_text_model_says_it(tmp_path: Path) -> None:
    maker = write_both(tmp_path, "glm4v_moe fp8") / "maker"
    config = config_of(maker)
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (maker / "config.json").write_text(json.dumps(config))
    packed = [
        moe_qlora.quantize_checkpoint(tmp_path / name, tmp_path / f"{name} packed", NF4)
        for name in ("maker", "plain")
    ]
    assert len({(one.id, str(one.config), str(one.experts)) for one in packed}) == 1
    adapt(tmp_path, AutoModelForImageTextToText)
    assert_same_merges(tmp_path)
    said = CliRunner().invoke(app, ["dump", str(maker), "--json"])
    assert any("is quantized with fp8" in note for note in json.loads(said.stdout)["notes"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_a_merge_equals_that_into_the_plain_folder(name: str, tmp_path: Path) -> None:
    write_both(tmp_path, name)
    adapt(tmp_path)
    found, plain = assert_same_merges(tmp_path), tensors(tmp_path / "plain")
    assert found.keys() == plain.keys()  # none of the makers' scales
    assert 0 < sum(not same(tensor, plain[key]) for key, tensor in found.items()) < len(found)
    out = tmp_path / "merged"
    for held in map(load_file, out.glob("*.safetensors")):
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 40_000
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "expected")
    assert not info["missing_keys"]
    assert model.dtype == torch.bfloat16 and not hasattr(model, "hf_quantizer")
    inputs = tiny_inputs(model)
    assert torch.equal(model(**inputs).logits, reference(**inputs).logits)
    assert verify(out).good


def test_verify_names_the_makers_method(folders) -> None:
    folder, _ = folders["deepseek_v3 fp8"]
    raw = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    report = verify(folder)
    assert (report.good, report.kind, report.method) == (True, "plain", "fp8")
    assert (report.tensors, report.nbytes) == (len(raw), sum(t.nbytes for t in raw.values()))
    assert report.dequantized == sum(key.endswith("_scale_inv") for key in raw)
    line = " ".join(CliRunner().invoke(app, ["verify", str(folder)]).output.split())
    assert "is whole: quantized by its maker (fp8)" in line
