"""What LoRA on packed experts does not take: the call, the error, the words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from training import packed

import moe_qlora
from moe_qlora.errors import AdapterError, ConfigError
from moe_qlora.testing import tiny_model

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapt(model_type: str = "qwen3_moe", options: Any = None, **fields: Any) -> Any:
    config = LoraConfig(r=2, **{"target_modules": ["q_proj"], **fields})
    return moe_qlora.get_peft_model(packed(model_type), config, **options or {})


MISSPELT = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_prj"]}
IA3 = peft.IA3Config(target_modules=["k_proj"])
DORA = LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, use_dora=True)
CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("exclude_modules.*no regular", lambda: moe_qlora.exclude_modules(packed(), "(")),
    ("exclude_modules holds 3", lambda: moe_qlora.exclude_modules(packed(), [3])),  # type: ignore[list-item]
    ("is a dict", lambda: moe_qlora.target_parameters(packed(), {"a": 1})),
    ("role 'sideways'", lambda: moe_qlora.target_parameters(packed(), roles=["sideways"])),
    ("experts is 3; give True, a list of roles", lambda: adapt(options={"experts": 3})),
    (
        r"layers_to_transform=\[7\] leaves no layer with packed",
        lambda: adapt(options={"experts": True}, layers_to_transform=[7]),
    ),
    ("mixed=True", lambda: adapt(options={"mixed": True})),
    (
        r"PeftModel with adapters \(default\); .*add_adapter",
        lambda: moe_qlora.get_peft_model(adapt(), LoraConfig(), adapter_name="second"),
    ),
    ("use_dora", lambda: peft.get_peft_model(packed(), DORA)),
    ("no parameter of this", lambda: peft.get_peft_model(packed(), LoraConfig(**MISSPELT))),
    (r"router.*around them.*'router\.layer'", lambda: adapt("dbrx", target_modules=["router"])),
    ("use a LoraConfig", lambda: moe_qlora.adapt_lora_config(packed(), IA3, experts=True)),
    (
        r"for models with packed experts.*moe_qlora\.(enabled\(\)|quantize_experts)",
        lambda: moe_qlora.get_peft_model(tiny_model("qwen3_moe"), LoraConfig(), experts=True),
    ),
    *(
        (
            rf"{field}=.*layers\.0\.mlp\.experts\.down_proj",
            lambda fields={field: value}: adapt(target_parameters=EXPERTS[1:], **fields),
        )
        for field, value in {
            "use_dora": True,
            "lora_bias": True,
            "fan_in_fan_out": True,
            "init_lora_weights": "pissa",
        }.items()
    ),
    *(
        (
            f"modules_to_save='{key}' asks to train model",
            lambda key=key: adapt(modules_to_save=["norm", key]),
        )
        for key in ("mlp", "experts.down_proj")
    ),
    (
        r"'gate_up_prj', which is no parameter of this model.*target_parameters\(model\)",
        lambda: adapt(target_parameters=["gate_up_prj", "experts.down_proj"]),
    ),
    ("model is a str", lambda: moe_qlora.adapt_lora_config("folder", LoraConfig())),  # type: ignore[arg-type]
    *(
        ("lora_config is a", lambda given=given: moe_qlora.adapt_lora_config(packed(), given))
        for given in ({}, None, LoraConfig)
    ),
]


@pytest.mark.parametrize(("words", "call"), CALLS, ids=[words for words, _ in CALLS])
def test_what_is_refused(words: str, call: Any) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "load_adapter": moe_qlora.load_adapter,
    "PeftModel": lambda model, folder: PeftModel.from_pretrained(model, folder),
    "transformers": lambda model, folder: model.load_adapter(str(folder)),
}


def lacking(tensors: dict[str, Any]) -> None:
    del tensors[next(key for key in tensors if ".experts.lora_B" in key)]


def elsewhere(tensors: dict[str, Any]) -> None:
    key = next(key for key in tensors if ".experts.lora_B" in key)
    tensors[key.replace("layers.0", "layers.9")] = tensors[key].clone()


def wider(tensors: dict[str, Any]) -> None:
    for key, value in tensors.items():
        tensors[key] = torch.cat([value, value], -1)


@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_does_not_fit(way: str, tmp_path: Path) -> None:
    adapter, file = tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors"
    adapt(options={"experts": True}).save_pretrained(adapter)
    load, whole = WAYS[way], load_file(file)
    for change, error, words in (
        (lacking, AdapterError, r"experts\.(base_layer\.)?lora_B.* is not in the file"),
        (elsewhere, AdapterError, r"layers\.9.* has no place"),
        (wider, AdapterError, r"does not fit this model: size mismatch for \S+lora_"),
    ):
        if (change, way) == (wider, "transformers"):
            continue  # the library says that itself
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(error, match=words):
            load(packed(), adapter)
    save_file(whole, file, {"format": "pt"})
    with pytest.raises(AdapterError, match="use it with the model that it was trained on"):
        load(packed("mixtral"), adapter)
