"""What PEFT is told about packed experts, against what stock PEFT then does with it."""

import copy
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes.nn.modules
import peft
import pytest
import torch
from oracle import Oracle, factors_of
from peft import LoraConfig
from small_models import decoded
from torch import nn
from training import adapted_layers, packed

import moe_qlora
from moe_qlora.lora.layer import ReadLinear
from moe_qlora.lora.targets import unfit_linears
from moe_qlora.packing import codec, parametrize, settings
from moe_qlora.testing import tiny_inputs, tiny_model

# Lists that name experts' matrices are given here to see what else they reach.
pytestmark = [
    pytest.mark.filterwarnings("ignore:target_modules names .* get no LoRA:UserWarning"),
    pytest.mark.filterwarnings("ignore:stock PEFT rewrites"),
]


def toy(*, packs: bool = True) -> nn.Module:
    """An experts module beside a Linear whose name ends alike."""
    model = nn.Module()
    model.experts, model.shared_expert = nn.Module(), nn.Module()
    model.experts.act_fn = nn.SiLU()
    model.experts.down_proj = nn.Parameter(torch.randn(3, 8, 16))
    model.shared_expert.down_proj = nn.Linear(8, 8)
    if packs:
        weight = codec.pack(model.experts.down_proj, settings.CodecSettings("nf4"))
        parametrize.attach(model.experts, "down_proj", weight)
    return model


INNER = ("act_fn", *(f"parametrizations{path}" for path in ("", ".down_proj", ".down_proj.0")))
TOY_PATHS = ["experts", *(f"experts.{name}" for name in INNER)]


@pytest.mark.parametrize("existing", [None, [], ["a", "b"], ("a", "b", "a"), {"b", "a"}])
def test_lists_are_new_complete_and_leave_the_callers_alone(existing):
    model, before = toy(), copy.deepcopy(existing)
    excluded = moe_qlora.exclude_modules(model, existing)
    own = ["a", "b"] if existing else []
    assert isinstance(excluded, list) and excluded[: len(own)] == own
    assert sorted(excluded[len(own) :]) == TOY_PATHS
    assert moe_qlora.target_parameters(model, existing) == [*own, "experts.down_proj"]
    assert existing == before and excluded is not existing
    excluded.append("more")
    assert "more" not in moe_qlora.exclude_modules(model)
    plain = toy(packs=False)  # where nothing is packed
    assert moe_qlora.exclude_modules(plain, existing) == own
    assert moe_qlora.target_parameters(plain, existing) == own


@pytest.mark.parametrize("existing", ["lm_head", r".*\.o_proj|x", "(?i:LM_HEAD)", ""])
def test_a_string_becomes_one_regex(existing):
    pattern = moe_qlora.exclude_modules(toy(), existing)
    assert isinstance(pattern, str)
    assert moe_qlora.exclude_modules(toy(packs=False), existing) == existing
    for path in TOY_PATHS:
        assert re.fullmatch(pattern, path)
    assert bool(re.fullmatch(pattern, "lm_head")) == ("head" in existing.lower())
    assert bool(re.fullmatch(pattern, "LM_HEAD")) == existing.startswith("(?i:")
    for path in ("shared_expert.down_proj", "x.experts", "experts.down_proj", "expertsXact_fn"):
        assert not re.fullmatch(pattern, path)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_linear_layers_get_lora_and_nothing_else(model_type):
    """Of leaf names that stock PEFT turns into target_parameters."""
    model = packed(model_type)
    leaves = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = moe_qlora.adapt_lora_config(model, LoraConfig(target_modules=list(leaves), r=4))
    wrapped = peft.get_peft_model(model, config)
    assert adapted_layers(wrapped) == {n for n in linears if n.rpartition(".")[2] in leaves}
    wrapped(input_ids=torch.arange(12).view(2, 6)).logits.sum().backward()
    for name, parameter in wrapped.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert not parameter.requires_grad or parameter.grad is not None, name


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("diffusion_gemma", {"router": True}), ("jetmoe", {}), ("jetmoe", {"experts": True})],
)
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


def test_layers_to_transform_and_the_callers_excludes_hold():
    model = packed("deepseek_v3")
    config = LoraConfig(
        target_modules=["o_proj", "down_proj"], layers_to_transform=[1], exclude_modules=["o_proj"]
    )
    wrapped = moe_qlora.get_peft_model(model, config)
    assert adapted_layers(wrapped) == {"model.layers.1.mlp.shared_experts.down_proj"}

    config = LoraConfig(target_modules=["q_proj"], layers_to_transform=1)
    wrapped = moe_qlora.get_peft_model(packed("qwen3_moe"), config, experts=True)
    lora = [name for name, _ in wrapped.named_parameters() if "lora_A" in name]
    assert len(lora) == 3 and all(".layers.1." in name for name in lora)


@dataclasses.dataclass
class HostsLoraConfig(LoraConfig):
    """A host's own: one more field, and a file that its parent class writes."""

    lora_plus_ratio: float | None = None

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ratio = fields.pop("lora_plus_ratio")
        LoraConfig(**fields).save_pretrained(save_directory, **kwargs)
        (Path(save_directory) / "ratio.json").write_text(json.dumps(ratio))


@pytest.mark.parametrize("packs", [True, False])
def test_the_callers_config_is_never_touched_and_its_words_are_written(packs, tmp_path):
    """Also one of a host's own class, which it stays."""
    config = HostsLoraConfig(
        target_modules=["q_proj", "down_proj"], exclude_modules={"lm_head"}, lora_plus_ratio=2.0,
        target_parameters=["experts.gate_up_proj"], rank_pattern={"q_proj": 2},
        modules_to_save=["norm"],
    )  # fmt: skip
    held = {key: value for key, value in vars(config).items() if isinstance(value, (dict, set))}
    before = copy.deepcopy(vars(config))
    model = packed("qwen2_moe") if packs else decoded(packed("qwen2_moe"))
    adapted = moe_qlora.adapt_lora_config(model, config)
    assert isinstance(adapted, HostsLoraConfig) and adapted.lora_plus_ratio == 2.0
    assert packs or (adapted == config and adapted is not config)
    wrapped = moe_qlora.get_peft_model(model, config, unpacked_ok=not packs)
    assert vars(config) == before
    for key, value in held.items():
        assert getattr(config, key) is value  # not swapped for an equal one either
        assert getattr(adapted, key) is not value
    if packs:
        own = {"self_attn.q_proj", "mlp.shared_expert.down_proj", "mlp.experts"}
        assert {name.split(".", 3)[3] for name in adapted_layers(wrapped)} == own
        wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
        assert json.loads((tmp_path / "ratio.json").read_text()) == 2.0
        written = json.loads((tmp_path / "adapter_config.json").read_text())
        assert sorted(written["target_modules"]) == ["down_proj", "q_proj"]
        assert written["target_parameters"] == ["experts.gate_up_proj"]
        assert written["exclude_modules"] == ["lm_head"]


def test_other_adapter_types_leave_packed_experts_alone():
    model = packed("mixtral")
    wrapped = moe_qlora.get_peft_model(
        model,
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )
    adapted = {name.split(".ia3_")[0] for name, _ in wrapped.named_parameters() if ".ia3_" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"k_proj"}
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = moe_qlora.get_peft_model(packed("mixtral"), prompt)
    wrapped(input_ids=torch.arange(6).view(1, 6)).logits.sum().backward()


# Linear layers beyond PEFT's LoRA: those that get none, and those whose weight is read.

UNFIT = {"deepseek_v4": "self_attn.o_a_proj", "nemotron_h": "mixer.out_proj"}


@pytest.mark.parametrize("model_type", UNFIT)
def test_all_linear_leaves_out_what_lora_does_not_suit(model_type):
    model = packed(model_type)
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    unfit = {name for name in linears if name.endswith(UNFIT[model_type])}
    assert set(unfit_linears(model)) == unfit
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="target_modules")
        peft_model = moe_qlora.get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert adapted_layers(peft_model) == linears - unfit
    assert set(unfit_linears(peft_model.get_base_model())) == unfit
    peft_model(**tiny_inputs(model))


def test_a_router_whose_weight_is_read_is_trained():
    model = packed("longcat_flash")
    oracle = Oracle(decoded(model), 1e-5)
    config = LoraConfig(r=3, target_modules="all-linear")
    peft_model = moe_qlora.get_peft_model(model, config, router=True)
    assert sum(isinstance(module, ReadLinear) for module in peft_model.modules()) == 2
    assert sum(".router." in name for name in factors_of(peft_model, "default")) == 2
    oracle.take(peft_model, "default", 8 / 3)
    oracle.train(peft_model, "default")
    with peft_model.disable_adapter():
        oracle.check(peft_model)
    peft_model.merge_adapter()
    oracle.check(peft_model, "default")


def test_a_weight_that_mambas_kernel_reads():
    """In bf16 the sum stays bf16, which the kernel multiplies by as it is."""
    model = packed("granitemoehybrid", dtype=torch.bfloat16)
    config = LoraConfig(r=3, target_modules=["out_proj"], init_lora_weights=False)
    peft_model = moe_qlora.get_peft_model(model, config)
    [layer] = [m for m in peft_model.modules() if isinstance(m, ReadLinear)]
    base, added = layer.get_base_layer().weight, layer.get_delta_weight("default")
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight, base + added.bfloat16())
    layer.weight.float().square().sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0
    with peft_model.disable_adapter():
        assert torch.equal(layer.weight, base)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*\.(q_proj|v_proj)"])
def test_modules_around_linear_layers_are_left_out_and_said(targets, tmp_path):
    model = packed("gemma4")
    base, ends = copy.deepcopy(model), ("q_proj", "v_proj")
    config = LoraConfig(target_modules=targets, init_lora_weights=False)
    with pytest.warns(UserWarning, match=r"vision_tower.*ClippableLinear.*left out.*_proj\.linear"):
        peft_model = moe_qlora.get_peft_model(model, config)
    expected = {n for n, m in base.named_modules() if isinstance(m, nn.Linear) and n.endswith(ends)}
    assert adapted_layers(peft_model) == expected
    peft_model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="target_modules")
        again = moe_qlora.load_adapter(copy.deepcopy(base), tmp_path)
        stock = peft.PeftModel.from_pretrained(base, tmp_path)
    assert adapted_layers(again) == adapted_layers(stock) == expected
