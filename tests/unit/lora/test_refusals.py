"""What LoRA on packed experts refuses, and what it says of calls that train something else."""

import copy
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from training import adapted_layers, packed
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import AdapterError, CheckpointError, ConfigError
from moe_qlora.testing import tiny_inputs, tiny_model
from tests.helpers.plans import plan

pytestmark = pytest.mark.filterwarnings("ignore:stock PEFT rewrites")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


get_peft_model, adapt_lora_config = moe_qlora.get_peft_model, moe_qlora.adapt_lora_config


def adapt(model_type: str = "qwen3_moe", options: Any = None, **fields: Any) -> Any:
    config = LoraConfig(r=2, **{"target_modules": ["q_proj"], **fields})
    return get_peft_model(packed(model_type), config, **options or {})


IA3 = peft.IA3Config(target_modules=["k_proj"])
STOCK = [LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, use_dora=True)]
STOCK += [LoraConfig(target_modules=["q_proj"], target_parameters=["gate_up_prj"])]
CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("exclude_modules.*no regular", lambda: moe_qlora.exclude_modules(packed(), "(")),
    ("exclude_modules holds 3", lambda: moe_qlora.exclude_modules(packed(), [3])),
    ("is a dict", lambda: moe_qlora.target_parameters(packed(), {"a": 1})),
    ("role 'sideways'", lambda: moe_qlora.target_parameters(packed(), roles=["sideways"])),
    ("experts is 3; give True, a list of roles", lambda: adapt(options={"experts": 3})),
    (r"=\[7\] leaves no", lambda: adapt(options={"experts": True}, layers_to_transform=[7])),
    ("mixed=True", lambda: adapt(options={"mixed": True})),
    (r"PeftModel with adapters \(default\); .*add_adapter", lambda: get_peft_model(adapt(), IA3)),
    ("use_dora", lambda: peft.get_peft_model(packed(), STOCK[0])),
    ("no parameter of this", lambda: peft.get_peft_model(packed(), STOCK[1])),
    (r"router.*around them.*'router\.layer'", lambda: adapt("dbrx", target_modules=["router"])),
    ("use a LoraConfig", lambda: adapt_lora_config(packed(), IA3, experts=True)),
    (
        r"for models with packed experts.*moe_qlora\.(enabled\(\)|quantize_experts)",
        lambda: get_peft_model(tiny_model("qwen3_moe"), LoraConfig(), experts=True),
    ),
    (
        r"'gate_up_prj', which is no parameter of this model.*target_parameters\(model\)",
        lambda: adapt(target_parameters=["gate_up_prj", "experts.down_proj"]),
    ),
    ("nothing else does: pass experts=True", lambda: adapt(target_modules=["up_proj"])),
    ("='mlp' asks to train model", lambda: adapt(modules_to_save=["norm", "mlp"])),
    ("='experts.down_proj' asks", lambda: adapt(modules_to_save=["experts.down_proj"])),
    ("model is a str", lambda: adapt_lora_config("folder", LoraConfig())),
    ("lora_config is a", lambda: adapt_lora_config(packed(), {})),
    ("lora_config is a", lambda: adapt_lora_config(packed(), LoraConfig)),
    *(
        (
            rf"{field}=.*layers\.0\.mlp\.experts\.down_proj",
            lambda fields={field: value}: adapt(target_parameters=EXPERTS[1:], **fields),
        )
        for field, value in (
            *(("use_dora", True), ("lora_bias", True), ("fan_in_fan_out", True)),
            ("init_lora_weights", "pissa"),
        )
    ),
]


@pytest.mark.parametrize(("words", "call"), CALLS, ids=[words for words, _ in CALLS])
def test_what_is_refused(words, call):
    with pytest.raises(ConfigError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


MLP = ["gate_proj", "up_proj", "down_proj"]
SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def marked(llm_int8_skip_modules: Any = None, **sizes: Any) -> Any:
    """A model that looks as if it was loaded with a BitsAndBytesConfig, outside of `enabled()`."""
    model, skips = tiny_model("qwen3_moe", **sizes), llm_int8_skip_modules
    model.config.quantization_config = BitsAndBytesConfig(**SETTINGS, llm_int8_skip_modules=skips)
    return model


def lora(*modules: str, **fields: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(modules) or ["q_proj"], **fields)


def adapted(model: nn.Module) -> set[str]:
    """The leaf names of layers, and the names of expert modules, that have LoRA."""
    names = adapted_layers(model)
    return {name.replace(".base_layer", "").rpartition(".")[2] for name in names}


# Experts that are there, and not packed.


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda model, **more: get_peft_model(model, lora(), **more), id="peft"),
        moe_qlora.target_parameters,
    ],
)
def test_unpacked_experts_are_a_warning_or_an_error_unless_they_are_meant(call):
    calls = r"4 expert weights are not packed .*experts\.gate_up_proj.*quantize_experts\(model\)"
    with pytest.warns(UserWarning, match=calls) as caught:
        call(tiny_model("qwen3_moe"))
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    with pytest.raises(ConfigError, match=r"4 expert weights are not packed .* asks for nf4"):
        call(marked())
    with pytest.raises(ConfigError, match="2 expert weights are not packed"):
        call(marked(llm_int8_skip_modules=["model.layers.0"]))
    for model in (tiny_model("qwen3_moe"), marked()):
        call(model, unpacked_ok=True)  # warnings are errors
    call(marked(llm_int8_skip_modules=["experts"]))
    call(marked(mlp_only_layers=[0, 1]))


# Lists of module targets that name matrices of experts.


@pytest.mark.parametrize(
    ("model_type", "config", "named"),
    [
        ("qwen2_moe", lora("q_proj", "down_proj"), "names down_proj,"),
        ("mixtral", lora("q_proj", "w1", "w2", "w3"), "names w1, w2, w3,"),
        ("gpt_oss", lora("q_proj", "experts"), "names experts,"),
        ("qwen3_moe", LoraConfig(target_modules=r".*(q_proj|experts\.\d+\.up_proj)"), "experts"),
        # Those that do not mean experts
        ("qwen2_moe", lora("q_proj", "k_proj", "v_proj", "o_proj"), None),
        ("qwen2_moe", LoraConfig(target_modules=r".*self_attn\.\w+_proj"), None),
        ("qwen2_moe", lora("q_proj", "down_proj", exclude_modules=["experts"]), None),
        ("qwen2_moe", lora("q_proj", "shared_expert.down_proj"), None),
    ],
)
def test_targets_that_name_experts_are_told_what_they_leave_out(model_type, config, named):
    said = f"{named}.* 4 packed expert weights .* get no LoRA.*experts=True"
    with pytest.warns(UserWarning, match=said) if named else nullcontext():
        peft_model = get_peft_model(packed(model_type), config)
    assert "experts" not in adapted(peft_model)


def test_experts_that_are_asked_for_or_excluded_by_the_call_it_names_are_silent():
    assert "experts" in adapted(adapt(options={"experts": ["down"]}, target_modules=MLP))
    fields = {"target_parameters": moe_qlora.target_parameters(packed())}
    assert "experts" in adapted(adapt(target_modules=["q_proj", *MLP], **fields))
    fields = {"exclude_modules": moe_qlora.exclude_modules(packed())}
    assert adapted(adapt(target_modules=["q_proj", *MLP], **fields)) == {"q_proj"}


def test_a_plan_notes_experts_that_its_targets_leave_out():
    notes = plan(tiny_model("qwen3_moe"), SETTINGS, seq=32, targets="q_proj,down_proj").notes
    assert any("4 packed expert weights" in note for note in notes)


# Patterns of ranks for experts.


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rank_patterns_of_experts_are_not_said_to_be_ignored():
    """Only one that matches nothing is, also of a second adapter."""
    model, fields = packed(), {"alpha_pattern": {"down_proj": 7}}
    fields["target_parameters"] = moe_qlora.target_parameters(model)
    config = lora(rank_pattern={"gate_up_proj": 5, "q_proj": 3, "gate_up_prj": 7}, **fields)
    said = "rank_pattern names gate_up_prj, and nothing"
    with pytest.warns(UserWarning, match=said):
        peft_model = get_peft_model(model, config)
    with pytest.warns(UserWarning, match=said):
        peft_model.add_adapter("second", config)
    for name in ("default", "second"):
        ranks = {n: len(p) for n, p in peft_model.named_parameters() if f"lora_A.{name}" in n}
        assert {rank for path, rank in ranks.items() if "q_proj" in path} == {3}
        assert {rank for path, rank in ranks.items() if ".base_layer." in path} == {5 * 4}


# Adapters that cannot be loaded.


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    adapt(options={"experts": True}).save_pretrained(folder)
    return folder


CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
DAMAGES: list[tuple[str, bytes | int | None, str]] = [  # a file, its new content or length, words
    ("", None, "is no folder; name the one"),
    (CONFIG, None, "it has no adapter_config.json"),
    (CONFIG, b"{", "is no valid JSON"),
    (CONFIG, b'{"peft_type": "NEW"}', "'NEW', which the installed PEFT does not know"),
    (CONFIG, b'{"peft_type": "LORA", "r": "many"}', "json is damaged: r is 'many'"),
    (WEIGHTS_FILE, None, rf"has no {WEIGHTS_FILE}"),
    (WEIGHTS_FILE, -64, "damaged weights .*download incomplete.*; copy the"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGES)
def test_files_that_are_missing_or_damaged_are_our_errors(name, content, words, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    file = folder / name
    if content is None:
        file.unlink() if name else shutil.rmtree(folder)
    else:
        file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:content])
    model = packed()
    with pytest.raises(CheckpointError, match=words) as caught:
        moe_qlora.load_adapter(model, str(folder))
    assert str(folder) in str(caught.value)
    # The model is as it was, and takes the right adapter next.
    assert moe_qlora.load_adapter(model, adapter).peft_config.keys() == {"default"}


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "load_adapter": moe_qlora.load_adapter,
    "PeftModel": lambda model, folder: PeftModel.from_pretrained(model, folder),
    "transformers": lambda model, folder: model.load_adapter(str(folder)),
}


@pytest.mark.filterwarnings("ignore:Already found a .peft_config.")
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_does_not_fit(way, adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    load, whole = WAYS[way], load_file(file := folder / WEIGHTS_FILE)
    key = next(key for key in whole if ".experts.lora_B" in key)
    elsewhere = {key.replace("layers.0", "layers.9"): whole[key].clone()}
    for tensors, words in (
        ({n: w for n, w in whole.items() if n != key}, r"lora_B.* is not in the file"),
        (whole | elsewhere, r"layers\.9.* has no place"),
        ({n: torch.cat([w, w], -1) for n, w in whole.items()}, r"size mismatch for \S+lora_"),
    ):
        if ("mismatch" in words, way) == (True, "transformers"):
            continue  # the library says that itself
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(AdapterError, match=words):
            load(packed(), folder)
    save_file(whole, file, {"format": "pt"})
    with pytest.raises(AdapterError, match="use it with the model that it was trained on"):
        load(packed("mixtral"), folder)


# Adapters of packed experts on experts in 16 bit.


def test_an_adapter_of_packed_experts_on_plain_ones_is_told(adapter):
    with pytest.warns(UserWarning, match="4 expert weights are not packed") as caught:
        loaded = moe_qlora.load_adapter(tiny_model("qwen3_moe"), adapter)
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    assert {"q_proj", "experts"} <= adapted(loaded)
    moe_qlora.load_adapter(tiny_model("qwen3_moe"), adapter, unpacked_ok=True)


# What is trained, as training starts.


def test_training_says_once_what_is_packed_and_trained(caplog):
    def logged() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name.startswith("moe_qlora")]

    model = packed(settings=SETTINGS)
    moe_qlora.quantize_experts(model, SETTINGS)  # again
    peft_model = get_peft_model(model, lora("q_proj", "k_proj", "o_proj"), experts=["down"])
    ids = tiny_inputs(model)
    peft_model.eval()(**ids)
    assert logged() == []
    twin = copy.deepcopy(peft_model)
    peft_model.train()
    with torch.no_grad():
        peft_model(**ids)
    assert logged() == []
    for _ in range(2):
        peft_model(**ids)
    (line,) = logged()
    assert caplog.records[-1].levelno == logging.WARNING  # seen without settings
    trained = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    weights = 2 * 4 * (80 * 64 + 64 * 40)
    after = weights / 2 + weights / 64 * 4 + 4 * 64  # codes, absmax, and four tables
    assert line.startswith(
        f"The experts of 2 layers are packed (nf4): {after / 1024:.1f} KiB instead of "
        f"{weights / 256:.1f} KiB. LoRA on 6 layers (k_proj, o_proj, q_proj) and 2 of 4 "
        f"expert weights (down_proj): {trained:,} weights ("
    )
    caplog.clear()
    twin.train()(**ids)  # a copy is another model
    assert logged() == [line]
