"""The class that loaders are built on, and the settings of its YAML block."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import yaml
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from moe_qlora import detect
from moe_qlora.errors import AdapterError, ConfigError, DetectionError, QuantizationError
from moe_qlora.integrations import settings
from moe_qlora.integrations.host import ExpertsHost
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_inputs, tiny_model
from moe_qlora.train.flat_rows import has_flat_rows

NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
ATTENTION = ["q_proj", "v_proj"]


def is_enabled() -> bool:
    return AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__name__.startswith("Packing")


@pytest.fixture(autouse=True)
def _off() -> Any:
    yield
    assert not is_enabled()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "qwen3_moe"
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


def load(folder: Path, config: Any = NF4) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    ).train()


def build(folder: Path, host: ExpertsHost) -> Any:
    with host.loading(NF4):
        model = load(folder)
    host.after_build(model)
    return model


def packed(model: nn.Module) -> list[str]:
    return [f"{module}.{name}" for module, _, name in parametrize.iter_packed(model)]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model(**tiny_inputs(base)).logits.float()


def stir(model: Any) -> Any:
    """Give every adapter weight a value, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_the_whole_way(folder: Path, tmp_path: Path) -> None:
    asked = LoraConfig(r=4, target_modules=list(ATTENTION))
    before = copy.deepcopy(asked.to_dict())
    with ExpertsHost({"lora_experts": True, "progress": False}) as host:
        with host.loading(NF4):
            model = load(folder)
        report = host.after_build(model)
        config = host.before_peft(model, asked)
        trained = host.after_peft(peft.get_peft_model(model, config))
    assert report is not None and len(report.already_quantized) == len(packed(model)) == 4
    assert asked.to_dict() == before
    stir(trained).save_pretrained(tmp_path / "adapter")
    merged = host.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert merged.rounded > 4
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), logits(trained), atol=2e-5, rtol=1e-4)
    with trained.disable_adapter():  # the adapter is seen at all
        assert (logits(plain) - logits(trained)).abs().max() > 1e-2


def test_every_unpacked_stack_is_named(folder: Path) -> None:
    model = load(folder)
    names = [param.name for param in detect(model)]
    with pytest.raises(QuantizationError, match="4 of 4 expert weights are not packed") as error:
        ExpertsHost().after_build(model)
    assert all(name in str(error.value) for name in names)
    report = ExpertsHost({"progress": False}).after_build(model, pack=True)
    assert report is not None and [row.name for row in report.quantized] == names == packed(model)


def test_settings_leave_experts_unpacked(folder: Path) -> None:
    model = build(folder, ExpertsHost({"skip_modules": ["model.layers.0"]}))
    assert len(packed(model)) == 2 and not any(".layers.0." in name for name in packed(model))
    host = ExpertsHost({"pack_experts": False})
    model = build(folder, host)
    assert packed(model) == [] and host.before_peft(model, lora()).target_parameters is None


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=list(ATTENTION), **more)


def test_lists_for_a_loader_that_makes_the_config_itself(folder: Path, tmp_path: Path) -> None:
    """Stock PEFT over packed experts, from the lists alone, computes what ours does."""
    host = ExpertsHost({"lora_experts": ["down"], "lora_router": True})
    right = build(folder, host)
    right = stir(host.after_peft(peft.get_peft_model(right, host.before_peft(right, lora()))))
    other = build(folder, host)
    fitted: Any = host.before_peft(other, lora(lora_dropout=0.2))
    names = ("target_modules", "target_parameters", "exclude_modules")
    lists = LoraConfig(r=4, **{name: getattr(fitted, name) for name in names})
    theirs = stir(host.after_peft(peft.get_peft_model(other, lists)))
    drops = [m.lora_dropout["default"] for m in theirs.modules() if isinstance(m, LoraLayer)]
    assert [drop.p for drop in drops] == [0.2] * 8
    torch.testing.assert_close(logits(theirs.eval()), logits(right.eval()))
    theirs.save_pretrained(tmp_path)
    right.save_pretrained(tmp_path / "right")
    files = [peft.PeftConfig.from_pretrained(each) for each in (tmp_path, tmp_path / "right")]
    for name in names:  # Files have the caller's spelling, not the loader's lists
        assert getattr(files[0], name) == getattr(files[1], name)


def test_a_model_is_looked_at_before_it_is_loaded(folder: Path) -> None:
    ExpertsHost({"lora_experts": ["down"]}).check_model(folder)
    ExpertsHost({"pack_experts": False}).check_model(LlamaConfig())
    ExpertsHost().check_model(folder / "nothing")  # the loader's own error says more
    with pytest.raises(DetectionError, match="llama model holds no fused expert"):
        ExpertsHost().check_model(LlamaConfig())
    with pytest.raises(
        ConfigError, match=r"\['up'\], and the experts of this qwen3_moe model have"
    ):
        ExpertsHost({"lora_experts": ["up"]}).check_model(folder)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("lora_expert: true", "lora_expert is True: Extra inputs are not permitted; the keys of"),
        ("pack_experts:", "pack_experts is None: Input should be a valid boolean"),
        ("lora_experts: [sideways]", "Input should be 'gate_up', 'gate', 'up' or 'down'"),
        ("lora_experts: []", "lora_experts is []: Input should be a valid boolean or Tuple should"),
        ("skip_modules: [3]", "skip_modules is 3: Input should be a valid string"),
        (
            "prepare_training: 40",
            "prepare_training is 40: Input should be a valid boolean or Input",
        ),
        ("- pack_experts", "Input should be a valid dictionary"),
        ("{pack_experts: false, lora_experts: [down]}", "pack_experts is false, and lora_experts"),
    ],
)
def test_bad_yaml_is_one_sentence(block: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^moe_qlora[.: ].*\.$") as error:
        ExpertsHost(yaml.safe_load(block))
    assert words in str(error.value) and ". " not in str(error.value)


def test_packing_is_off_on_every_way_out(folder: Path) -> None:
    host = ExpertsHost()
    with pytest.raises(OSError), host.loading():
        load(folder / "nothing")
    assert not is_enabled()
    with host:
        host.before_build()
        assert is_enabled()
    assert not is_enabled()
    host.before_build(NF4)
    with pytest.raises(DetectionError):
        host.after_build(nn.Linear(2, 2))
    assert not is_enabled()


def test_refusals(folder: Path) -> None:
    model, plain = build(folder, ExpertsHost()), tiny_model("qwen3_moe")
    for block, call, error, words in (
        ({}, lambda host: host.after_build(plain), ConfigError, "without a BitsAndBytesConfig"),
        ({}, lambda host: host.before_build(BitsAndBytesConfig()), ConfigError, "neither 4 nor 8"),
        (True, lambda host: host.after_peft(model), AdapterError, "the model has no adapter"),
        (["up"], lambda host: host.before_peft(model, lora()), ConfigError, r"has \['down', 'gate"),
        (
            True, lambda host: host.after_peft(peft.get_peft_model(model, lora())),
            AdapterError, r"LoRA on model\.layers\.0\.mlp\.experts\.gate_up_proj",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call(ExpertsHost({"lora_experts": block or False}))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """axolotl's plugin, on stand-ins of the two names that its file takes from axolotl."""
    base, log = ModuleType("axolotl.integrations.base"), ModuleType("axolotl.utils.logging")
    base.BasePlugin, log.get_logger = object, logging.getLogger  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations", "axolotl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (base, log):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "moe_qlora.integrations.axolotl", raising=False)
    ours = importlib.import_module("moe_qlora.integrations.axolotl")
    monkeypatch.delitem(sys.modules, ours.__name__)
    return ours.MoeQloraPlugin()


def test_the_plugins_hooks_on_a_saved_adapter(plugin: Any, folder: Path, tmp_path: Path) -> None:
    host = ExpertsHost({"lora_experts": True})
    trained = build(folder, host)
    trained = stir(host.after_peft(peft.get_peft_model(trained, host.before_peft(trained, lora()))))
    trained.save_pretrained(tmp_path)
    cfg = {
        "plugins": [settings.PLUGIN], "adapter": "qlora", "load_in_4bit": True,
        "base_model": str(folder), "lora_model_dir": str(tmp_path), "lora_dropout": 0.2,
        "micro_batch_size": 3, "sequence_len": 64,
        "moe_qlora": {"lora_experts": True, "prepare_training": "1GiB"},
    }  # fmt: skip
    plugin.pre_model_load(cfg)
    model = load(folder)
    plugin.post_model_build(cfg, model)
    assert not is_enabled() and len(packed(model)) == 4
    plugin.pre_lora_load(cfg, model)
    again: Any = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    plugin.post_lora_load(cfg, again)
    drops = [m.lora_dropout["default"] for m in again.modules() if isinstance(m, LoraLayer)]
    assert [drop.p for drop in drops] == [0.2] * 8
    torch.testing.assert_close(logits(again.eval()), logits(trained.eval()))
    plugin.post_trainer_create(cfg, SimpleNamespace(model=again))
    assert has_flat_rows(again)
    plugin.post_train_unload(cfg)
    assert not has_flat_rows(again) and plugin.host is None
    plugin.pre_model_load(cfg)  # A build that never reaches the weights
    assert is_enabled()
    plugin.register({**cfg, "plugins": []})
    assert not is_enabled() and plugin.host is None
