"""The class that loaders are built on, its YAML block, and axolotl's plugin on it."""

import copy
import importlib
import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
import yaml
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from small_models import fill
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from moe_qlora import detect
from moe_qlora.errors import AdapterError, ConfigError, DetectionError, QuantizationError
from moe_qlora.integrations import settings
from moe_qlora.integrations.host import ExpertsHost
from moe_qlora.planning.plan import plan_settings
from moe_qlora.testing import tiny_inputs, tiny_model
from moe_qlora.train.flat_rows import has_flat_rows
from tests.helpers import training
from tests.helpers.training import is_enabled, packed_names

pytestmark = pytest.mark.usefixtures("left_off")
NF4 = BitsAndBytesConfig(**training.NF4, bnb_4bit_compute_dtype=torch.float32)
QLORA = {"adapter": "qlora", "load_in_4bit": True}


def load(folder, config=NF4):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    ).train()


def build(folder, host):
    with host.loading(NF4):
        model = load(folder)
    host.after_build(model)
    return model


def lora(**more):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)


def adapted(folder, host):
    """A packed model with the host's LoRA, as trained."""
    model = build(folder, host)
    return fill(host.after_peft(peft.get_peft_model(model, host.before_peft(model, lora()))))


@torch.no_grad()
def logits(model):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return model(**tiny_inputs(base)).logits.float()


def test_the_whole_way(folder, tmp_path):
    asked = lora()
    before = copy.deepcopy(asked.to_dict())
    with ExpertsHost({"lora_experts": True, "progress": False}) as host:
        with host.loading(NF4):
            model = load(folder)
        report = host.after_build(model)
        config = host.before_peft(model, asked)
        trained = host.after_peft(peft.get_peft_model(model, config))
    assert report is not None and len(report.already_quantized) == len(packed_names(model)) == 4
    assert asked.to_dict() == before
    fill(trained).save_pretrained(tmp_path / "adapter")
    merged = host.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert merged.rounded > 4
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(plain), logits(trained), atol=2e-5, rtol=1e-4)
    with trained.disable_adapter():  # the adapter is seen at all
        assert (logits(plain) - logits(trained)).abs().max() > 1e-2


def test_every_unpacked_stack_is_named_and_settings_leave_some_unpacked(folder):
    model = load(folder)
    names = [param.name for param in detect(model)]
    with pytest.raises(QuantizationError, match="4 of 4 expert weights are not packed") as error:
        ExpertsHost().after_build(model)
    assert all(name in str(error.value) for name in names)
    report = ExpertsHost({"progress": False}).after_build(model, pack=True)
    assert report is not None and [row.name for row in report.quantized] == names == packed_names(
        model
    )
    model = build(folder, ExpertsHost({"skip_modules": ["model.layers.0"]}))
    assert packed_names(model) == names[2:]
    host = ExpertsHost({"pack_experts": False})
    model = build(folder, host)
    assert packed_names(model) == [] and host.before_peft(model, lora()).target_parameters is None


def test_lists_for_a_loader_that_makes_the_config_itself(folder, tmp_path):
    """Stock PEFT over packed experts, from the lists alone, computes what ours does."""
    host = ExpertsHost({"lora_experts": ["down"], "lora_router": True})
    right = adapted(folder, host)
    other = build(folder, host)
    fitted = host.before_peft(other, lora())
    names = ("target_modules", "target_parameters", "exclude_modules")
    lists = LoraConfig(r=4, **{name: getattr(fitted, name) for name in names})
    theirs = fill(host.after_peft(peft.get_peft_model(other, lists)))
    torch.testing.assert_close(logits(theirs.eval()), logits(right.eval()))
    theirs.save_pretrained(tmp_path)
    right.save_pretrained(tmp_path / "right")
    files = [peft.PeftConfig.from_pretrained(each) for each in (tmp_path, tmp_path / "right")]
    for name in names:  # Files have the caller's spelling, not the loader's lists
        assert getattr(files[0], name) == getattr(files[1], name)


def test_a_model_is_looked_at_before_it_is_loaded(folder):
    ExpertsHost({"lora_experts": ["down"]}).check_model(folder)
    ExpertsHost({"pack_experts": False}).check_model(LlamaConfig())
    ExpertsHost().check_model(folder / "nothing")  # the loader's own error says more
    with pytest.raises(DetectionError, match="llama model holds no fused expert"):
        ExpertsHost().check_model(LlamaConfig())
    with pytest.raises(ConfigError, match=r"\['up'\], and the experts of this qwen3_moe model"):
        ExpertsHost({"lora_experts": ["up"]}).check_model(folder)


def test_packing_is_off_on_every_way_out(folder):
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


def test_refusals(folder):
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


COLLIDING = {
    "nf4_backend": "torchao",
    "tensor_parallel_size": 2,
    "expert_parallel_size": 4,
    "deepspeed": "configs/zero3_bf16.json",
    "fsdp_config": "{cpu_ram_efficient_loading: true}",
    "experts_implementation": "grouped_mm",
}
REFUSED_FILES = [
    ("adapter:", "adapter is None, and moe_qlora packs experts for LoRA: set adapter: qlora"),
    ("load_in_4bit: false", "adapter is 'qlora' and load_in_4bit is not true: set load_in"),
    ("adapter: lora", "adapter is 'lora' and load_in_4bit is true: set load_in_8bit: true"),
    ("{peft_use_dora: true, moe_qlora: {lora_experts: true}}", "peft_use_dora is true, and moe_q"),
    ("{torch_compile: auto, moe_qlora: {prepare_training: 40GiB}}", "torch_compile is set, and p"),
    ("moe_qlora: {lora_expert: true}", "moe_qlora.lora_expert is True: Extra inputs are not"),
    ("moe_qlora: {pack_experts: }", "moe_qlora.pack_experts is None: Input should be a valid bool"),
    ("moe_qlora: {lora_experts: [up, sideways]}", "moe_qlora.lora_experts is ['up', 'sideways']: "),
    ("moe_qlora: {prepare_training: 40}", "moe_qlora.prepare_training is 40: Input should be a v"),
    ("moe_qlora: [pack_experts]", "moe_qlora: Input should be a valid dictionary"),
    ("moe_qlora: {pack_experts: false, lora_router: true}", "moe_qlora: Value error, pack_expert"),
    *((f"{k}: {COLLIDING.get(k, 'true')}", f"{k} is set beside") for k in settings._REFUSED),
]


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES)
def test_a_file_that_is_refused_is_one_sentence(text, message):
    config = QLORA | yaml.safe_load(text)
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError) as error:
        settings.check(config)
    said = str(error.value)
    assert said.startswith(message) and said.endswith(".")
    assert "\n" not in said and ". " not in said
    assert config == before


def test_good_files_pass():
    harmless = {
        "tensor_parallel_size": 1, "deepspeed": "configs/zero2.json", "expert_parallel_size": 1,
        "nf4_backend": "bitsandbytes", "quantize_moe_experts": False, "relora": None,
        "experts_implementation": "eager", "peft_use_dora": True,
        "fsdp_config": {"cpu_ram_efficient_loading": False},
    }  # fmt: skip
    for config, packs in (
        ({"adapter": "lora", "load_in_8bit": True}, True),
        (QLORA | harmless, True),
        ({"moe_qlora": {"pack_experts": False}, "quantize_moe_experts": True}, False),
        ({"merge_lora": True, "load_in_4bit": False, "adapter": "qlora"}, False),
    ):
        settings.check(config)
        assert settings.wants_packing(config) == packs


def test_a_validated_configuration_is_planned():
    """`axolotl moe-experts CONFIG --gpus GPUS` gives plan what axolotl's validation left."""
    cfg = SimpleNamespace(
        base_model="qwen3_moe", **QLORA, micro_batch_size=2, sequence_len=256,
        gradient_accumulation_steps=4, lora_r=8, lora_target_modules=["q_proj", "v_proj"],
        moe_qlora={"lora_experts": True}, gradient_checkpointing=True,
        optimizer=SimpleNamespace(value="adamw_bnb_8bit"),
    )  # fmt: skip
    made = plan_settings(**settings.plan_arguments(cfg, 1), search=False).settings
    assert (made.batch, made.seq, made.rank, made.accumulation) == (2, 256, 8, 4)
    assert (made.targets, made.optimizer) == ("q_proj,v_proj,experts", "adamw_8bit")
    assert made.checkpointing and made.engine is None
    assert settings.plan_arguments(cfg, 4)["engine"] == "ddp"
    cfg.fsdp_config = {"reshard_after_forward": True}
    assert settings.plan_arguments(cfg, 4)["engine"] == "fsdp"
    for change, message in (
        ({"adapter": None}, "adapter is None, and plans are of LoRA on packed"),
        ({"load_in_4bit": None}, "adapter is 'qlora', and plans are of LoRA on packed"),
        ({"lora_target_modules": ".*q_proj"}, "lora_target_modules is '.*q_proj', and plans take"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            settings.plan_arguments(SimpleNamespace(**{**vars(cfg), **change}), 1)


@pytest.fixture
def plugin(monkeypatch):
    """axolotl's plugin, on stand-ins of the two names that its file takes from axolotl."""
    base, log = ModuleType("axolotl.integrations.base"), ModuleType("axolotl.utils.logging")
    base.BasePlugin, log.get_logger = object, logging.getLogger
    for name in ("axolotl", "axolotl.integrations", "axolotl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (base, log):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "moe_qlora.integrations.axolotl", raising=False)
    ours = importlib.import_module("moe_qlora.integrations.axolotl")
    monkeypatch.delitem(sys.modules, ours.__name__)
    return ours.MoeQloraPlugin()


def test_the_plugins_hooks_on_a_saved_adapter(plugin, folder, tmp_path):
    host = ExpertsHost({"lora_experts": True})
    trained = adapted(folder, host)
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
    assert not is_enabled() and len(packed_names(model)) == 4
    plugin.pre_lora_load(cfg, model)
    again = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
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
