"""Merging on disk equals merging in memory, for every kind of layout that a checkpoint may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from folders import assert_close, tensors
from peft import LoraConfig
from small_models import fill
from torch import nn
from training import SETTINGS, packed

import moe_qlora
from moe_qlora import merge_adapter, testing
from moe_qlora.checkpoint import conversion
from moe_qlora.checkpoint.manifest import open_checkpoint
from moe_qlora.errors import AdapterError
from moe_qlora.lora.config import spell_exactly

# Spellings that stock PEFT rewrites, tied embeddings, bases in no folder.
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = [
    "qwen3_moe",  # a key for each expert and projection
    "mixtral",  # the same, under other names and in another order
    "ernie4_5_vl_moe",  # two banks made of one list of keys
    "gpt_oss",  # fused on disk, transposed, biased
    "granitemoe",  # fused on disk under other names, tied embeddings
    "llama4_text",  # transposed, and the module does not say so
    "inkling_mm_model",  # interleaved halves, stacked shared experts
    "nemotron_h",  # no gate, experts in some layers only
    "dbrx",  # a matrix of all experts
    "jetmoe",  # experts in attention, tied embeddings
]
# Mamba layers are no LoRA targets for PEFT.
UNTARGETED = {"out_proj", "conv1d"}


@pytest.fixture(autouse=True)
def _few_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny stacks are cut into slices too, mostly of three experts and one."""
    monkeypatch.setattr(conversion, "SLICE_ELEMENTS", 13000)


def targets(model: nn.Module) -> tuple[list[str], list[str]]:
    """All expert parameters that PEFT can adapt, and all Linear layers outside of them."""
    layout = moe_qlora.detect(model)
    inside = tuple(f"{module.name}." for module in layout.modules)
    linears = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.rpartition(".")[2] not in UNTARGETED
        and not name.startswith(inside)
    ]
    return linears, [param.name for param in layout.experts if len(param.shape) < 4]


def adapt(model: Any, folder: Path) -> Any:
    """A random adapter on everything, saved."""
    linears, experts = targets(model)
    config: Any = LoraConfig(r=3, lora_alpha=7, target_modules=linears, target_parameters=experts)
    if moe_qlora.target_parameters(model):
        adapted = moe_qlora.get_peft_model(model, config)
    else:
        adapted = peft.get_peft_model(model, spell_exactly(model, config))
    fill(adapted, size=0.1).save_pretrained(folder)
    return adapted


def on_disk(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with open_checkpoint(folder) as checkpoint:
        return {key: (checkpoint.info(key).shape, checkpoint.info(key).dtype) for key in checkpoint}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_plain_base_gives_what_stock_peft_merges_in_memory(model_type, tmp_path):
    model: Any = testing.tiny_model(model_type)
    kind, inputs = type(model), testing.tiny_inputs(model)
    model.save_pretrained(tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert on_disk(tmp_path / "out") == on_disk(tmp_path / "base")
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    merged = adapted.merge_and_unload()
    assert_close(loaded.state_dict(), merged.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs)[0], merged(**inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_packed_base_and_like_training_give_what_is_merged_in_memory(model_type, tmp_path):
    testing.tiny_model(model_type).save_pretrained(tmp_path / "base")
    model = packed(model_type, SETTINGS["int8" if model_type in ("mixtral", "gpt_oss") else "nf4"])
    model.save_pretrained(tmp_path / "packed")
    experts = moe_qlora.target_parameters(model)
    adapted = adapt(model, tmp_path / "adapter")
    how: dict[str, Any] = {"one": {}, "two": {"like_training": True}, "exact": {}}
    for out, options in how.items():
        base = tmp_path / ("packed" if out == "one" else "base")
        merge_adapter(base, tmp_path / "adapter", tmp_path / out, **options)
    assert on_disk(tmp_path / "one") == on_disk(tmp_path / "base") == on_disk(tmp_path / "two")
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    merged = adapted.merge_and_unload()
    loaded, exact = (
        type(merged).from_pretrained(tmp_path / name).state_dict() for name in ("one", "exact")
    )
    assert_close(loaded, merged.state_dict())
    for name in experts:
        if loaded[name].dim() == 3:  # the same sums, in the same order
            assert torch.equal(loaded[name], merged.state_dict()[name]), name
        assert not torch.allclose(loaded[name], exact[name], rtol=0, atol=1e-5), name


def test_tied_experts_take_one_adapter(tmp_path: Path) -> None:
    """diffusion_gemma's encoder and decoder share all experts, which are once on disk."""
    model: Any = testing.tiny_model("diffusion_gemma")
    model.save_pretrained(tmp_path / "base")
    every = [name for param in moe_qlora.detect(model) for name in (param.name, *param.aliases)]
    names = [name for name in every if "decoder." in name]
    config = LoraConfig(r=3, target_modules=[], target_parameters=names)
    adapted: Any = peft.get_peft_model(model, config)
    fill(adapted, size=0.1).save_pretrained(tmp_path / "one")
    merge_adapter(tmp_path / "base", tmp_path / "one", tmp_path / "out")
    adapted.merge_and_unload().save_pretrained(tmp_path / "reference")
    assert_close(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))

    adapt(testing.tiny_model("diffusion_gemma"), tmp_path / "both")
    with pytest.raises(AdapterError, match=r"in different ways, and the base ties them"):
        merge_adapter(tmp_path / "base", tmp_path / "both", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
