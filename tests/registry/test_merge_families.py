"""Merging on disk equals merging in memory, for every kind of layout that a checkpoint may have."""

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
def test_merging_on_disk_is_merging_in_memory(model_type, tmp_path):
    """Into a plain base as stock PEFT does; into a packed one, or like it, as it was trained."""
    plain: Any = testing.tiny_model(model_type)
    kind, inputs = type(plain), testing.tiny_inputs(plain)
    plain.save_pretrained(tmp_path / "base")
    model = packed(model_type, SETTINGS["int8" if model_type in ("mixtral", "gpt_oss") else "nf4"])
    model.save_pretrained(tmp_path / "packed")
    experts = moe_qlora.target_parameters(model)
    trained = adapt(model, tmp_path / "adapter").merge_and_unload()
    stock: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    for out, options in {"one": {}, "two": {"like_training": True}, "exact": {}}.items():
        base = tmp_path / ("packed" if out == "one" else "base")
        merge_adapter(base, tmp_path / "adapter", tmp_path / out, **options)
        assert on_disk(tmp_path / out) == on_disk(tmp_path / "base")
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    exact, report = kind.from_pretrained(tmp_path / "exact", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_close(exact.state_dict(), stock.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(exact(**inputs)[0], stock(**inputs)[0], rtol=0, atol=2e-5)
    loaded, wanted = (m.state_dict() for m in (kind.from_pretrained(tmp_path / "one"), trained))
    assert_close(loaded, wanted)
    for name in experts:
        if loaded[name].dim() == 3:  # the same sums, in the same order
            assert torch.equal(loaded[name], wanted[name]), name
        assert not torch.allclose(loaded[name], exact.get_parameter(name), rtol=0, atol=1e-5), name


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
