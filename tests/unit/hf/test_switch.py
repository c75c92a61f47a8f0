"""The switch, and loading while packing."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from folders import bits
from safetensors.torch import load_file, save_file
from torch import nn
from training import NF4, loaded, packed_names
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)
from transformers.integrations.accelerate import _get_device_map, get_device
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import SequentialLlama4TextExperts

import moe_qlora
from moe_qlora.checkpoint import conversion
from moe_qlora.checkpoint.folder import Checkpoint
from moe_qlora.hf import switch
from moe_qlora.hf.quantizer import packing_quantizer
from moe_qlora.testing import tiny_model
from tests.helpers.fitting import Live

STOCK = {name: AUTO_QUANTIZER_MAPPING[name] for name in ("bitsandbytes_4bit", "bitsandbytes_8bit")}


def is_stock() -> bool:
    return all(AUTO_QUANTIZER_MAPPING[name] is cls for name, cls in STOCK.items())


@pytest.fixture(autouse=True)
def _off() -> Any:
    yield
    moe_qlora.disable()
    assert is_stock()


def load(folder: Path, **arguments: Any) -> Any:
    arguments.setdefault("quantization_config", BitsAndBytesConfig(**NF4))
    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


def test_enable_and_disable_are_a_switch_not_a_count_and_blocks_overlap() -> None:
    moe_qlora.enable()
    moe_qlora.enable()
    assert not is_stock()
    moe_qlora.disable()
    assert is_stock()
    with pytest.raises(OSError), moe_qlora.enabled():
        AutoModelForCausalLM.from_pretrained("/nothing")
    assert is_stock()
    first, second = moe_qlora.enabled(), moe_qlora.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_stock()
    moe_qlora.disable()
    assert not is_stock()
    second.__exit__(None, None, None)
    assert is_stock()


SETTINGS: list[tuple[dict[str, Any], torch.dtype | None, Any]] = [
    ({"load_in_8bit": True}, torch.bfloat16, "auto"),
    ({"load_in_4bit": True, "llm_int8_skip_modules": ["layers.0.mlp.experts"]}, None, None),
    (NF4 | {"bnb_4bit_quant_storage": torch.bfloat16}, torch.float16, {"": "cpu"}),
]


@pytest.mark.parametrize(("settings", "dtype", "device_map"), SETTINGS)
def test_every_setting(
    folder: Path, settings: Any, dtype: Any, device_map: Any, tmp_path: Path
) -> None:
    arguments = {"dtype": dtype, "device_map": device_map}
    config = BitsAndBytesConfig(**settings)
    before = config.to_dict()
    reference = load(folder, quantization_config=config, **arguments)
    moe_qlora.quantize_experts(reference)
    with moe_qlora.enabled():
        model = load(folder, quantization_config=config, **arguments)
    assert [*bits(model).items()] == [*bits(reference).items()]
    assert config.to_dict() == before
    assert model.is_loaded_in_8bit is ("load_in_8bit" in settings)
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, None, dtype="auto")
    assert packed_names(again) == packed_names(model)
    assert len(packed_names(model)) == (2 if dtype is None else 4)
    assert bits(again) == bits(model)


def test_tensors_instead_of_files(folder: Path) -> None:
    state = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    with moe_qlora.enabled():
        expected = load(folder)
        config = {"quantization_config": BitsAndBytesConfig(**NF4)}
        config |= {"config": Qwen3MoeConfig.from_pretrained(folder)}
        model = type(expected).from_pretrained(None, state_dict=state, **config)
    assert bits(model) == bits(expected)


def test_a_model_without_experts_loads_as_ever(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    plain = load(tmp_path)
    with moe_qlora.enabled(offload=True):
        model = load(tmp_path)
    assert bits(model) == bits(plain)
    assert type(model.hf_quantizer) is type(plain.hf_quantizer)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # single experts on disk, and fused
def test_a_load_needs_few_experts_beside_what_it_makes(family, tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 512, "num_experts": 32}
    if family == "gpt_oss":
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_local_experts": 32}
    model: Any = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=1, **sizes)
    model.save_pretrained(tmp_path)
    experts = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("_proj"))
    del model
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 2**18)
    live, stock = Live([]), Checkpoint.read

    def read(*given: Any) -> torch.Tensor:
        live.add(tensor := stock(*given).clone())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", read)
    with live, moe_qlora.enabled():
        packed_model = load(tmp_path, dtype=torch.bfloat16)
    most = live.peak - live.live
    assert experts > 12_000_000 and most < 4_000_000, most
    assert packed_names(packed_model)


def test_device_maps_are_even() -> None:
    kind, devices = "auto", 4
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "vocab_size": 9000}
    config = Qwen3MoeConfig(num_hidden_layers=12, num_experts=64, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    cls = packing_quantizer(STOCK["bitsandbytes_4bit"], switch.asked)
    quantizer = cls(BitsAndBytesConfig(**NF4), pre_quantized=False)
    quantizer.update_device_map(kind)
    quantizer.preprocess_model(model, dtype=torch.bfloat16, device_map=kind, checkpoint_files=None)
    places = _get_device_map(model, kind, dict.fromkeys(range(devices), 24 << 30), quantizer)
    held, block = dict.fromkeys(range(devices), 0.0), 0.0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * quantizer.param_element_size(model, name, parameter)
        held[get_device(places, name)] += size
        block += size if name.startswith("model.layers.0.") else 0
    mean = sum(held.values()) / devices
    assert max(held.values()) < mean + block
    assert min(held.values()) > mean - block


def test_folders_that_bitsandbytes_has_packed(tmp_path: Path) -> None:
    """Linear layers alone; Llama 4's experts too, which its quantizer makes layers of."""
    plain: Any = tiny_model("llama4_text", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    stock = load(tmp_path / "plain")
    stock.save_pretrained(tmp_path / "stock")  # experts are in 16 bit there
    with moe_qlora.enabled():
        model = type(plain).from_pretrained(tmp_path / "stock")
        expected = load(tmp_path / "plain")
    assert packed_names(model) == packed_names(expected) != []
    assert bits(model) == bits(expected)

    for name, module in list(stock.named_modules()):
        if type(module).__name__ == "Llama4TextExperts":
            layers = SequentialLlama4TextExperts(stock.config).to(torch.bfloat16)
            stock.set_submodule(name, layers)
            for path, linear in list(layers.named_modules()):
                if type(linear) is nn.Linear:
                    sizes = linear.in_features, linear.out_features
                    layer = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4")
                    layer.weight = bnb.nn.Params4bit(linear.weight.data, False, quant_type="nf4")
                    layers.set_submodule(path, layer.to("cpu"))
    state = {key: value.contiguous() for key, value in stock.state_dict().items()}
    save_file(state, tmp_path / "stock" / "model.safetensors", metadata={"format": "pt"})
    expected = type(plain).from_pretrained(tmp_path / "stock")
    with moe_qlora.enabled():
        model = type(plain).from_pretrained(tmp_path / "stock")
    assert not packed_names(model) and bits(model) == bits(expected)
