"""Loading of folders that their makers quantized, under a bitsandbytes config of the caller's."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

import moe_qlora
from moe_qlora.errors import CheckpointError
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_inputs, tiny_model

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
MERGE = "merge_quantization_configs"
STOCK = (dict(AUTO_QUANTIZER_MAPPING), AutoHfQuantizer.__dict__[MERGE])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

Stored = tuple[dict[str, Tensor], Tensor]
"""What lies on disk of a weight, and the 16-bit weight that it stands for."""


def block_fp8(
    key: str, weight: Tensor, generator: torch.Generator, block: tuple[int, int] = (16, 24)
) -> Stored:
    """Blocks of 16 x 24 are cut off at the edges."""
    high, wide = block
    grid = (-(-weight.shape[-2] // high), -(-weight.shape[-1] // wide))
    scale = torch.rand(*weight.shape[:-2], *grid, generator=generator) / 1000 + 1e-4
    rows, columns = weight.shape[-2:]
    spread = scale.repeat_interleave(high, -2).repeat_interleave(wide, -1)[..., :rows, :columns]
    codes = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {key: codes, f"{key}_scale_inv": scale}, (codes.float() * spread).bfloat16()


def e2m1(codes: Tensor) -> Tensor:
    """Values of codes of 4 bits."""
    return E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())


def random_codes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)


def mxfp4(key: str, weight: Tensor, generator: torch.Generator) -> Stored:
    """gpt-oss's: (experts, out, groups, 16) bytes for the plain (experts, in, out)."""
    experts, inner, out = weight.shape
    codes = random_codes(generator, experts, out, inner // 32, 32)
    scale = torch.randint(115, 122, codes.shape[:3], generator=generator, dtype=torch.uint8)
    plain = e2m1(codes) * torch.exp2(scale.float() - 127)[..., None]
    stored = {f"{key}_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, f"{key}_scales": scale}
    return stored, plain.flatten(-2).transpose(1, 2).contiguous().bfloat16()


def nvfp4(key: str, weight: Tensor, generator: torch.Generator) -> Stored:
    """modelopt's: bytes, an FP8 scale for 8 codes, one fp32 scale for all, an activation's."""
    rows, columns = weight.shape
    codes = random_codes(generator, rows, columns)
    scale = (torch.rand(rows, columns // 8, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0078)
    plain = e2m1(codes) * (scale.float() * factor).repeat_interleave(8, 1)
    stored = {
        key: codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{key}_scale": scale,
        f"{key}_scale_2": factor,
        key.replace("weight", "input_scale"): torch.tensor(1.5),
    }
    return stored, plain.bfloat16()


def int4(key: str, weight: Tensor, generator: torch.Generator) -> Stored:
    """compressed-tensors': eight codes in an int32, a bf16 scale for 8 of them, the shape."""
    rows, columns = weight.shape
    codes = random_codes(generator, rows, columns)
    scale = (torch.rand(rows, columns // 8, generator=generator) / 100).bfloat16()
    plain = (codes.float() - 8) * scale.float().repeat_interleave(8, 1)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        words |= codes[:, place::8].long() << 4 * place
    stored = {
        f"{key}_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).int(),
        f"{key}_scale": scale,
        f"{key}_shape": torch.tensor([rows, columns]),
    }
    return stored, plain.bfloat16()


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True}}
GROUP["weights"] |= {"strategy": "group", "group_size": 8}  # type: ignore[operator]
FORMATS: dict[str, tuple[str, Callable[..., Stored], dict[str, Any]]] = {
    "fp8": ("deepseek_v3", block_fp8, {"quant_method": "fp8", "weight_block_size": [16, 24]}),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "int4": (
        "qwen3_moe",
        int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": GROUP},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    ),
    "nvfp4": (
        "glm4_moe",
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 8, "ignore": ["lm_head"]},
    ),
    # whose blocks stock transformers can read
    "even fp8": (
        "qwen3_moe",
        partial(block_fp8, block=(8, 8)),
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
    ),
}
KINDS = ("fp8", "mxfp4", "int4", "nvfp4")


def is_quantized(kind: str, key: str) -> bool:
    if kind == "mxfp4":
        return key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return "_proj" in key and key.endswith(".weight")


def write(folder: Path, kind: str) -> None:
    """Write `maker`, as a model's maker ships it, and `plain`, the 16-bit folder it stands for."""
    model: Any = tiny_model(FORMATS[kind][0], dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain")
    write_folders(folder, kind)


def write_folders(folder: Path, kind: str) -> None:
    """Quantize the weights in `plain` into `maker`, and replace them by what these stand for."""
    _, quantize, config = FORMATS[kind]
    generator = torch.Generator().manual_seed(1)
    plain, stored = {}, {}
    for key, weight in load_file(folder / "plain" / "model.safetensors").items():
        plain[key], stored[key] = weight, weight
        if is_quantized(kind, key):
            del stored[key]
            tensors, plain[key] = quantize(key, weight, generator)
            stored |= {name: tensor.contiguous() for name, tensor in tensors.items()}
    if kind == "fp8":  # a multi-token prediction layer, which the model does not have
        key = "model.layers.61.self_attn.q_proj.weight"
        tensors, plain[key] = quantize(key, torch.ones(7, 5), generator)
        stored |= tensors
    shutil.copytree(folder / "plain", folder / "maker", ignore=shutil.ignore_patterns("*.saf*"))
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "maker" / "model.safetensors", metadata={"format": "pt"})
    set_config(folder / "maker", quantization_config=config)


def set_config(folder: Path, **entries: Any) -> None:
    said = json.loads((folder / "config.json").read_text())
    said = {key: value for key, value in {**said, **entries}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("makers")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            write(root / kind, kind)
        return root / kind

    return folder


def is_stock() -> bool:
    return (dict(AUTO_QUANTIZER_MAPPING), AutoHfQuantizer.__dict__[MERGE]) == STOCK


@pytest.fixture(autouse=True)
def _off() -> Any:
    yield
    assert is_stock()


def load(folder: Path, **arguments: Any) -> Any:
    """Load under the switch, by default into NF4."""
    if not arguments.pop("stock", False):
        arguments.setdefault("quantization_config", BitsAndBytesConfig(**NF4))
    with moe_qlora.enabled():
        return AutoModelForCausalLM.from_pretrained(folder, **arguments)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def bits(model: nn.Module) -> dict[str, Any]:
    """All bytes of a model, with dtype and shape."""
    return {
        name: (tensor.dtype, tensor.shape, as_bytes(tensor))
        for name, tensor in model.state_dict().items()
    }


def packed(model: nn.Module) -> list[str]:
    return [f"{module}.{name}" for module, _, name in parametrize.iter_packed(model)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_equals_that_of_the_plain_folder(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, config = folders(kind), BitsAndBytesConfig(**NF4)
    before, on_disk = config.to_dict(), (folder / "maker" / "config.json").read_text()
    model, info = load(folder / "maker", quantization_config=config, output_loading_info=True)
    expected, plain_info = load(folder / "plain", output_loading_info=True)
    assert packed(model) == packed(expected) != []
    assert bits(model) == bits(expected)
    assert info == plain_info
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert config.to_dict() == before
    assert vars(config) == vars(BitsAndBytesConfig(**NF4))
    assert (folder / "maker" / "config.json").read_text() == on_disk
    assert model.config.to_dict() == expected.config.to_dict() | {
        "_name_or_path": str(folder / "maker")
    }
    assert vars(model.hf_quantizer).keys() == vars(expected.hf_quantizer).keys()

    model.save_pretrained(tmp_path / "packed")
    with moe_qlora.enabled():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert bits(again) == bits(model)
    inputs = tiny_inputs(model)
    logits = expected(**inputs).logits
    assert torch.equal(model(**inputs).logits, logits)
    assert torch.equal(again(**inputs).logits, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_model_is_saved_as_that_of_the_plain_folder(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    saved = {}
    for name in ("maker", "plain"):
        load(folders(kind) / name).dequantize().save_pretrained(tmp_path / name)
        saved[name] = load_file(tmp_path / name / "model.safetensors")
    assert saved["maker"].keys() == saved["plain"].keys()
    for key, tensor in saved["maker"].items():
        assert torch.equal(tensor, saved["plain"][key]), key


SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True},
    "single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "storage": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
    "skip layers": {**NF4, "llm_int8_skip_modules": ["self_attn", "layers.1.mlp.experts"]},
    "skip none": {**NF4, "llm_int8_skip_modules": []},
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float32, "device_map": "auto"},
    {"dtype": torch.float16, "device_map": {"": "cpu"}},
    {"device_map": {"": "cpu"}, "as_dict": True},
]


# Every two of: the settings, the format; the arguments change from one to the next.
@pytest.mark.parametrize(
    ("setting", "kind", "arguments"),
    [
        (setting, kind, ARGUMENTS[(row + column) % len(ARGUMENTS)])
        for row, setting in enumerate(SETTINGS)
        for column, kind in enumerate(KINDS)
        if column != row % len(KINDS)
    ],
)
def test_every_setting(
    setting: str, kind: str, arguments: dict[str, Any], folders: Callable[[str], Path]
) -> None:
    arguments = dict(arguments)
    config: Any = SETTINGS[setting]
    if not arguments.pop("as_dict", False):
        config = BitsAndBytesConfig(**config)
    model = load(folders(kind) / "maker", quantization_config=config, **arguments)
    expected = load(folders(kind) / "plain", quantization_config=config, **arguments)
    assert bits(model) == bits(expected)
    assert model.dtype == expected.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_training(kind: str, folders: Callable[[str], Path]) -> None:
    losses = {}
    for name in ("maker", "plain"):
        model = load(folders(kind) / name, dtype=torch.float32)
        torch.manual_seed(0)
        tuned = moe_qlora.get_peft_model(
            model, LoraConfig(r=2, target_modules=["o_proj"], lora_alpha=8)
        )
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], 1e-2)
        inputs = tiny_inputs(model)
        losses[name] = []
        for _ in range(3):
            loss = tuned(**inputs, labels=inputs["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["maker"] == losses["plain"]
    assert losses["maker"][-1] < losses["maker"][0]


def test_a_model_without_experts(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 40, "vocab_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    write_folders(tmp_path, "fp8")
    assert bits(load(tmp_path / "maker")) == bits(load(tmp_path / "plain"))


def test_several_files(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Scales may lie in another file than the codes that they belong to."""
    source = folders("fp8") / "maker"
    shutil.copytree(source, tmp_path / "maker")
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "maker" / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        name = f"model-{number}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::3]}
        save_file(part, tmp_path / "maker" / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "maker" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bits(load(tmp_path / "maker")) == bits(load(folders("fp8") / "plain"))


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn"])
def test_a_config_without_a_dtype_to_compute_in(
    dtype: str | None, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders("fp8") / "maker", tmp_path / "maker")
    set_config(tmp_path / "maker", dtype=dtype)
    model = load(tmp_path / "maker", dtype="auto")
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert bits(model) == bits(load(folders("fp8") / "plain"))


def test_a_config_object_of_the_caller_is_left_as_it_is(folders: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(folders("fp8") / "maker")
    before = json.dumps(config.to_dict(), default=str)
    model = load(folders("fp8") / "maker", config=config)
    assert json.dumps(config.to_dict(), default=str) == before
    assert model.config.quantization_config.quant_method == "bitsandbytes"
    assert bits(model) == bits(load(folders("fp8") / "plain"))


def test_without_a_config_of_the_caller_the_load_is_the_stock_one(
    folders: Callable[[str], Path],
) -> None:
    folder = folders("even fp8") / "maker"
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder, stock=True)
    assert not packed(model)
    assert bits(model) == bits(stock)
    assert bits(model) == bits(load(folder.parent / "plain", stock=True))
    assert model.config.to_dict() == stock.config.to_dict()
    own = FineGrainedFP8Config(weight_block_size=[8, 8], dequantize=True)
    assert bits(load(folder, quantization_config=own)) == bits(stock)
    with pytest.raises(ValueError, match="FineGrainedFP8Config but you are passing"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**NF4))


@pytest.mark.parametrize("method", ["gptq", "awq", "nonsense"])
def test_a_method_that_is_not_read_is_refused_before_files_are(
    method: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders("int4") / "maker", tmp_path / "maker")
    set_config(tmp_path / "maker", quantization_config={"quant_method": method, "bits": 4})
    if method != "nonsense":  # stock ignores a config that it does not know
        (tmp_path / "maker" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=rf"quant_method {method}, which is not read") as seen:
        load(tmp_path / "maker")
    assert str(seen.value).count("\n") == 0


def test_tensors_instead_of_files_are_refused(folders: Callable[[str], Path]) -> None:
    folder = folders("fp8") / "maker"
    state = load_file(folder / "model.safetensors")
    seen = r"quantized \(fp8\) and is dequantized from safetensors files only"
    with pytest.raises(CheckpointError, match=seen), moe_qlora.enabled():
        DeepseekV3ForCausalLM.from_pretrained(
            None,
            config=AutoConfig.from_pretrained(folder),
            state_dict=state,
            quantization_config=BitsAndBytesConfig(**NF4),
        )


# The switch


def test_off_after_a_load_that_fails(folders: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folders("int4") / "maker", tmp_path / "maker")
    tensors = load_file(tmp_path / "maker" / "model.safetensors")
    gone = next(key for key in tensors if key.endswith("experts.2.down_proj.weight_scale"))
    del tensors[gone]
    save_file(tensors, tmp_path / "maker" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj"):
        load(tmp_path / "maker")
    assert is_stock()


def test_blocks_nest_and_overlap_in_threads() -> None:
    start, states = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        for _ in range(100):
            with moe_qlora.enabled():
                states.append(AutoHfQuantizer.__dict__[MERGE] is not STOCK[1])
                with moe_qlora.enabled():
                    pass
                states.append(AutoHfQuantizer.__dict__[MERGE] is not STOCK[1])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 800
    assert all(states)
    assert is_stock()


def test_a_method_that_came_in_between_stays_and_goes_on_as_stock(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("fp8") / "maker"
    calls = []
    with moe_qlora.enabled():
        ours = AutoHfQuantizer.merge_quantization_configs

        def theirs(*configs: Any) -> Any:
            calls.append(configs)
            return ours(*configs)

        monkeypatch.setattr(AutoHfQuantizer, MERGE, staticmethod(theirs))
        assert packed(load(folder))
    assert AutoHfQuantizer.merge_quantization_configs is theirs
    with pytest.raises(ValueError, match="FineGrainedFP8Config but you are passing"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**NF4))
    assert len(calls) == 2
    monkeypatch.undo()  # puts ours back
    assert AutoHfQuantizer.__dict__[MERGE] is not STOCK[1]
    setattr(AutoHfQuantizer, MERGE, STOCK[1])
