"""Loading of folders that their makers quantized, under a bitsandbytes config of the caller's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
)

from moe_qlora.errors import CheckpointError, ConfigError
from tests.helpers.folders import bits, set_json, tensors
from tests.helpers.prequantized import write_both
from tests.helpers.training import NF4, loaded, packed_names

FP8 = "deepseek_v3 fp8"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `maker` and `plain`."""
    return write_both(tmp_path_factory.mktemp("makers"), FP8)


def load(folder: Path, quantization_config: Any = NF4, **arguments: Any) -> Any:
    """Load under the switch, by default into NF4."""
    return loaded(folder, quantization_config, **{"dtype": "auto", **arguments})


SKIPS = {**NF4, "llm_int8_skip_modules": ["self_attn", "lm_head"]}
CASES: dict[str, dict[str, Any]] = {
    FP8: SKIPS,
    "gpt_oss mxfp4": {"load_in_8bit": True},
    "deepseek_v3 int4": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
    "qwen3_moe modelopt nvfp4": {"load_in_4bit": True},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_load_equals_that_of_the_plain_folder(kind, fp8, tmp_path):
    settings, folder = CASES[kind], fp8 if kind == FP8 else write_both(tmp_path, kind)
    config = BitsAndBytesConfig(**settings)
    before, on_disk = config.to_dict(), (folder / "maker" / "config.json").read_text()
    model, info = load(folder / "maker", quantization_config=config, output_loading_info=True)
    expected, plain_info = load(folder / "plain", settings, output_loading_info=True)
    assert packed_names(model) == packed_names(expected) != []
    assert bits(model) == bits(expected)
    assert info == plain_info and not info["missing_keys"]
    # what predicts more tokens, which no tiny model ignores
    assert all("layers.2." in key for key in info["unexpected_keys"])
    assert config.to_dict() == before
    assert (folder / "maker" / "config.json").read_text() == on_disk
    assert model.config.to_dict() == expected.config.to_dict() | {
        "_name_or_path": str(folder / "maker")
    }
    model.save_pretrained(tmp_path / "packed")
    assert bits(load(tmp_path / "packed", None)) == bits(model)


def test_without_a_config_of_the_caller_the_load_is_the_stock_one(tmp_path: Path) -> None:
    folder = write_both(tmp_path, "qwen3_moe fp8") / "maker"
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder, None)
    assert not packed_names(model)
    assert bits(model) == bits(stock)
    assert bits(model) == bits(load(tmp_path / "plain", None))
    assert model.config.to_dict() == stock.config.to_dict()
    own = FineGrainedFP8Config(weight_block_size=[8, 8], dequantize=True)
    assert bits(load(folder, quantization_config=own)) == bits(stock)
    with pytest.raises(ValueError, match="FineGrainedFP8Config but you are passing"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**NF4))


def test_what_is_not_read_is_refused(fp8: Path, tmp_path: Path) -> None:
    places = {"model": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    config = BitsAndBytesConfig(**NF4, llm_int8_enable_fp32_cpu_offload=True)
    with pytest.raises(ConfigError, match=r"sends model\.layers\.1 to disk, and .*\(fp8\)"):
        load(fp8 / "maker", config, offload_folder=tmp_path, device_map=places)
    state, config = tensors(fp8 / "maker"), AutoConfig.from_pretrained(fp8 / "maker")
    seen = r"quantized \(fp8\) and is dequantized from safetensors files only"
    with pytest.raises(CheckpointError, match=seen):
        loaded(None, NF4, DeepseekV3ForCausalLM, config=config, state_dict=state)
    folder = Path(shutil.copytree(fp8 / "maker", tmp_path / "maker"))
    for method in ("nonsense", "gptq"):
        set_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
        with pytest.raises(CheckpointError, match=rf"says {method}, which is not read here"):
            load(folder)
        # before files are; stock transformers ignores a method that it does not know
        next(folder.glob("*.safetensors")).write_bytes(b"damaged")
