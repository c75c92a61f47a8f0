"""What PEFT is told about packed experts, against what stock PEFT then does with it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import bitsandbytes.nn.modules
import peft
import pytest
import small_models
import torch
from peft import LoraConfig
from torch import nn
from training import adapted_layers, packed

import moe_qlora
from moe_qlora.packing import codec, parametrize, settings
from moe_qlora.testing import tiny_inputs, tiny_model

# Lists that name experts' matrices are given here to see what else they reach.
pytestmark = [
    pytest.mark.filterwarnings("ignore:target_modules names .* get no LoRA:UserWarning"),
    pytest.mark.filterwarnings("ignore:stock PEFT rewrites"),
]

MODELS = ("qwen2_moe", "mixtral", "deepseek_v3")
LEAVES = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(model_type: str, *, packed: bool = True) -> Any:
    model = small_models.build(model_type)
    return model if packed else small_models.decoded(model)


def linear_names(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


class Toy(nn.Module):
    """Two experts modules beside Linears whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.act_fn = nn.SiLU()
        self.experts.down_proj = nn.Parameter(torch.randn(3, 8, 16))
        self.shared_expert = nn.Module()
        self.shared_expert.down_proj = nn.Linear(8, 8)


def packed_toy() -> Toy:
    toy = Toy()
    packed = codec.pack(toy.experts.down_proj, settings.CodecSettings("nf4"))
    parametrize.attach(toy.experts, "down_proj", packed)
    return toy


TOY_PATHS = [
    "experts",
    "experts.act_fn",
    "experts.parametrizations",
    "experts.parametrizations.down_proj",
    "experts.parametrizations.down_proj.0",
]


@pytest.mark.parametrize("existing", [None, [], ["a", "b"], ("a", "b", "a"), {"b", "a"}])
def test_lists_are_new_complete_and_leave_the_callers_alone(existing: Any) -> None:
    toy, before = packed_toy(), copy.deepcopy(existing)
    excluded = moe_qlora.exclude_modules(toy, existing)
    targets = moe_qlora.target_parameters(toy, existing)
    own = ["a", "b"] if existing else []
    assert isinstance(excluded, list) and excluded[: len(own)] == own
    assert sorted(excluded[len(own) :]) == TOY_PATHS
    assert targets == [*own, "experts.down_proj"]
    assert existing == before and excluded is not existing
    excluded.append("more")
    assert "more" not in moe_qlora.exclude_modules(toy)
    assert moe_qlora.exclude_modules(Toy(), existing) == own  # where nothing is packed
    assert moe_qlora.target_parameters(Toy(), existing) == own


@pytest.mark.parametrize("existing", ["lm_head", r".*\.o_proj|x", "(?i:LM_HEAD)", ""])
def test_a_string_becomes_one_regex(existing: str) -> None:
    pattern = moe_qlora.exclude_modules(packed_toy(), existing)
    assert isinstance(pattern, str)
    assert moe_qlora.exclude_modules(Toy(), existing) == existing
    for path in TOY_PATHS:
        assert re.fullmatch(pattern, path)
    assert bool(re.fullmatch(pattern, "lm_head")) == ("head" in existing.lower())
    assert bool(re.fullmatch(pattern, "LM_HEAD")) == existing.startswith("(?i:")
    for path in ("shared_expert.down_proj", "x.experts", "experts.down_proj", "expertsXact_fn"):
        assert not re.fullmatch(pattern, path)


@pytest.mark.parametrize("modules", ["all-linear", LEAVES], ids=["all-linear", "leaves"])
@pytest.mark.parametrize("model_type", MODELS)
def test_linear_layers_get_lora_and_nothing_else(model_type: str, modules: Any) -> None:
    """Also those with the leaf names that stock PEFT turns into target_parameters."""
    model = build(model_type)
    expected = linear_names(model)
    if modules is LEAVES:
        expected = {name for name in expected if name.rpartition(".")[2] in LEAVES}
    config = moe_qlora.adapt_lora_config(model, LoraConfig(target_modules=modules, r=4))
    wrapped = peft.get_peft_model(model, config)
    assert adapted_layers(wrapped) == expected
    wrapped(input_ids=torch.arange(12).view(2, 6)).logits.sum().backward()
    for name, parameter in wrapped.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert not parameter.requires_grad or parameter.grad is not None, name


@pytest.mark.parametrize("options", [{}, {"experts": True}, {"router": True}], ids=str)
@pytest.mark.parametrize("model_type", ["diffusion_gemma", "jetmoe"])
def test_all_linear_is_written_as_what_it_reached(model_type, options, tmp_path, monkeypatch):
    """Also where routers are Linear: our excludes are not in the file, nor in a second adapter."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    config = LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    trained = moe_qlora.get_peft_model(packed(model_type), config, **options)
    reached = adapted_layers(trained)
    if "router" not in options:  # diffusion_gemma's decoder has its own, with the encoder's weights
        assert not any(re.search(r"\.router(\.|$)", name) for name in reached)
    trained.save_pretrained(tmp_path)

    loaded = moe_qlora.load_adapter(packed(model_type), tmp_path)
    assert adapted_layers(loaded) == reached
    inputs = tiny_inputs(loaded)
    if model_type != "diffusion_gemma":  # whose forward draws noise
        with torch.no_grad():
            outputs = [m.eval()(**inputs)[0] for m in (trained, loaded)]
        assert torch.equal(*outputs)
    stock = peft.PeftModel.from_pretrained(tiny_model(model_type), tmp_path)
    assert adapted_layers(stock) == reached
    stock(**inputs)
    trained.add_adapter("second", trained.peft_config["default"])
    keys = [{k for k in trained.state_dict() if f".{name}." in k} for name in ("default", "second")]
    assert {key.replace(".default.", ".second.") for key in keys[0]} == keys[1]


def test_layers_to_transform_and_the_callers_excludes_hold() -> None:
    model = build("deepseek_v3")
    config = LoraConfig(
        target_modules=["o_proj", "down_proj"], layers_to_transform=[1], exclude_modules=["o_proj"]
    )
    wrapped = moe_qlora.get_peft_model(model, config)
    assert adapted_layers(wrapped) == {"model.layers.1.mlp.shared_experts.down_proj"}

    config = LoraConfig(target_modules=["q_proj"], layers_to_transform=1)
    wrapped = moe_qlora.get_peft_model(build("qwen3_moe"), config, experts=True)
    lora = [name for name, _ in wrapped.named_parameters() if "lora_A" in name]
    assert len(lora) == 3 and all(".layers.1." in name for name in lora)


@pytest.mark.parametrize("packed", [True, False])
def test_the_callers_config_is_never_touched_and_its_words_are_written(packed, tmp_path) -> None:
    config = LoraConfig(
        target_modules=["q_proj", "down_proj"], exclude_modules={"lm_head"},
        target_parameters=["experts.gate_up_proj"], rank_pattern={"q_proj": 2},
        modules_to_save=["norm"],
    )  # fmt: skip
    held = {key: value for key, value in vars(config).items() if isinstance(value, (dict, set))}
    before = copy.deepcopy(vars(config))
    model = build("qwen3_moe", packed=packed)
    adapted = moe_qlora.adapt_lora_config(model, config)
    assert packed or (adapted == config and adapted is not config)
    wrapped = moe_qlora.get_peft_model(model, config, unpacked_ok=not packed)
    assert vars(config) == before
    for key, value in held.items():
        assert getattr(config, key) is value  # not swapped for an equal one either
        assert getattr(adapted, key) is not value
    if packed:
        wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
        written = json.loads((tmp_path / "adapter_config.json").read_text())
        assert sorted(written["target_modules"]) == ["down_proj", "q_proj"]
        assert written["target_parameters"] == ["experts.gate_up_proj"]
        assert written["exclude_modules"] == ["lm_head"]


def test_other_adapter_types_leave_packed_experts_alone() -> None:
    model = build("mixtral")
    wrapped = moe_qlora.get_peft_model(
        model,
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )
    adapted = {name.split(".ia3_")[0] for name, _ in wrapped.named_parameters() if ".ia3_" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"k_proj"}
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = moe_qlora.get_peft_model(build("mixtral"), prompt)
    wrapped(input_ids=torch.arange(6).view(1, 6)).logits.sum().backward()


@dataclasses.dataclass
class HostsLoraConfig(LoraConfig):
    """A host's own: one more field, and a file that its parent class writes."""

    lora_plus_ratio: float | None = None

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "lora_plus_ratio"
        }
        LoraConfig(**fields).save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / "ratio.json").write_text(json.dumps(self.lora_plus_ratio))


def test_a_hosts_own_lora_config_stays_one(tmp_path: Path) -> None:
    model = build("qwen2_moe")
    asked = {"r": 2, "target_modules": ["down_proj", "q_proj"]}
    asked["target_parameters"] = moe_qlora.target_parameters(model)
    config = HostsLoraConfig(**asked, lora_plus_ratio=2.0)
    adapted = moe_qlora.adapt_lora_config(model, config)
    assert isinstance(adapted, HostsLoraConfig) and adapted.lora_plus_ratio == 2.0
    written = []
    for name, given in (("theirs", config), ("plain", LoraConfig(**asked))):
        wrapped = moe_qlora.get_peft_model(build("qwen2_moe"), given)
        wrapped.save_pretrained(tmp_path / name, save_embedding_layers=False)
        fields = json.loads((tmp_path / name / "adapter_config.json").read_text())
        named = {key: sorted(v) if isinstance(v, list) else v for key, v in fields.items()}
        written.append((adapted_layers(wrapped), named))
    assert written[0] == written[1]
    assert json.loads((tmp_path / "theirs/ratio.json").read_text()) == 2.0
    assert written[0][1]["target_modules"] == ["down_proj", "q_proj"]
    assert written[0][1]["exclude_modules"] is None
