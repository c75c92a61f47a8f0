"""Calls that would train something other than was meant: each is said, by name, before training."""

from __future__ import annotations

import copy
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from peft import LoraConfig
from torch import nn
from training import adapted_layers
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.errors import CheckpointError, ConfigError
from moe_qlora.testing import tiny_inputs, tiny_model
from tests.helpers.plans import plan

pytestmark = pytest.mark.filterwarnings("ignore:stock PEFT rewrites")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
packed = partial(training.packed, settings=SETTINGS)


def marked(**fields: Any) -> Any:
    """A model that looks as if it was loaded with a BitsAndBytesConfig, outside of `enabled()`."""
    model = tiny_model("qwen3_moe")
    model.config.quantization_config = BitsAndBytesConfig(**SETTINGS, **fields)
    return model


def lora(*modules: str, **fields: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(modules) or ["q_proj"], **fields)


def adapted(model: nn.Module) -> set[str]:
    """The leaf names of layers, and the names of expert modules, that have LoRA."""
    names = adapted_layers(model)
    return {name.replace(".base_layer", "").rpartition(".")[2] for name in names}


calls = pytest.mark.parametrize(
    "call",
    [
        lambda model, **more: moe_qlora.get_peft_model(model, lora(), **more),
        moe_qlora.target_parameters,
    ],
    ids=["get_peft_model", "target_parameters"],
)


# Experts that are there, and not packed.


@calls
def test_unpacked_experts_are_a_warning_or_an_error_that_names_the_calls(call: Any) -> None:
    said = (
        r"4 expert weights are not packed .*mlp\.experts\.gate_up_proj.*quantize_experts\(model\)"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        call(tiny_model("qwen3_moe"))
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    with pytest.raises(ConfigError, match=r"4 expert weights are not packed .* asks for nf4"):
        call(marked())
    with pytest.raises(ConfigError, match="2 expert weights are not packed"):
        call(marked(llm_int8_skip_modules=["model.layers.0"]))


@calls
def test_unpacked_experts_that_are_meant_are_silent(call: Any) -> None:
    for model in (tiny_model("qwen3_moe"), marked()):
        call(model, unpacked_ok=True)  # warnings are errors
    call(marked(llm_int8_skip_modules=["experts"]))
    dense = tiny_model("qwen3_moe", mlp_only_layers=[0, 1])
    dense.config.quantization_config = BitsAndBytesConfig(**SETTINGS)
    call(dense)


# Lists of module targets that name matrices of experts.


@pytest.mark.parametrize(
    ("model_type", "more"),
    [("qwen2_moe", ["down_proj"]), ("mixtral", ["w1", "w2", "w3"]), ("gpt_oss", ["experts"])],
)
def test_module_targets_that_name_experts_are_told_what_they_leave_out(
    model_type: str, more: list[str]
) -> None:
    model = packed(model_type)
    said = f"names {', '.join(more)},.* 4 packed expert weights .* get no LoRA.*experts=True"
    with pytest.warns(UserWarning, match=said):
        peft_model = moe_qlora.get_peft_model(model, lora("q_proj", *more))
    assert not any("experts" in name for name in adapted(peft_model))
    with pytest.raises(ConfigError, match=r"and nothing else does: pass experts=True"):
        moe_qlora.get_peft_model(packed(), lora(*MLP))
    regex = LoraConfig(r=2, target_modules=r".*(q_proj|experts\.\d+\.(gate|up|down)_proj)")
    with pytest.warns(UserWarning, match="packed expert weights .* get no LoRA"):
        moe_qlora.get_peft_model(packed(), regex)


@pytest.mark.parametrize(
    "config",
    [
        lora(*ATTENTION),
        LoraConfig(r=2, target_modules=r".*self_attn\.\w+_proj"),
        lora("q_proj", "down_proj", exclude_modules=["experts"]),
        lora("q_proj", "shared_expert.down_proj"),
    ],
    ids=["attention", "regex", "excluded", "shared"],
)
def test_targets_that_do_not_mean_experts_are_silent(config: LoraConfig) -> None:
    moe_qlora.get_peft_model(packed("qwen2_moe"), config)


def test_experts_that_are_asked_for_or_excluded_by_the_call_it_names_are_silent() -> None:
    peft_model = moe_qlora.get_peft_model(packed(), lora("q_proj", *MLP), experts=["down"])
    assert "experts" in adapted(peft_model)
    model = packed()
    named = lora("q_proj", *MLP, target_parameters=moe_qlora.target_parameters(model))
    assert "experts" in adapted(moe_qlora.get_peft_model(model, named))
    model = packed()
    left = lora("q_proj", *MLP, exclude_modules=moe_qlora.exclude_modules(model))
    assert adapted(moe_qlora.get_peft_model(model, left)) == {"q_proj"}


def test_a_plan_notes_experts_that_its_targets_leave_out() -> None:
    notes = plan(tiny_model("qwen3_moe"), SETTINGS, seq=32, targets="q_proj,down_proj").notes
    assert any("4 packed expert weights" in note for note in notes)


# Patterns of ranks for experts.


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rank_patterns_of_experts_are_not_said_to_be_ignored() -> None:
    """Only one that matches nothing is, also of a second adapter."""
    model, fields = packed(), {"alpha_pattern": {"down_proj": 7}}
    fields["target_parameters"] = moe_qlora.target_parameters(model)
    config = lora(rank_pattern={"gate_up_proj": 5, "q_proj": 3, "gate_up_prj": 7}, **fields)
    said = "rank_pattern names gate_up_prj, and nothing"
    with pytest.warns(UserWarning, match=said):
        peft_model = moe_qlora.get_peft_model(model, config)
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
    moe_qlora.get_peft_model(packed(), lora(), experts=True).save_pretrained(folder)
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
def test_files_that_are_missing_or_damaged_are_our_errors(
    name: str, content: bytes | int | None, words: str, adapter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
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


# Adapters of packed experts on experts in 16 bit.


def test_an_adapter_of_packed_experts_on_plain_ones_is_told(adapter: Path) -> None:
    with pytest.warns(UserWarning, match="4 expert weights are not packed") as caught:
        loaded = moe_qlora.load_adapter(tiny_model("qwen3_moe"), adapter)
    assert {one.filename for one in caught if one.category is UserWarning} == {__file__}
    assert {"q_proj", "experts"} <= adapted(loaded)
    moe_qlora.load_adapter(tiny_model("qwen3_moe"), adapter, unpacked_ok=True)


# What is trained, as training starts.


def test_training_says_once_what_is_packed_and_trained(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name.startswith("moe_qlora")]

    model = packed()
    moe_qlora.quantize_experts(model, SETTINGS)  # again
    peft_model = moe_qlora.get_peft_model(model, lora(*ATTENTION), experts=["down"])
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
        f"{weights / 256:.1f} KiB. LoRA on 8 layers (k_proj, o_proj, q_proj, v_proj) and 2 of 4 "
        f"expert weights (down_proj): {trained:,} weights ("
    )
    caplog.clear()
    twin.train()(**ids)  # a copy is another model
    assert logged() == [line]
