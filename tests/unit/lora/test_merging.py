"""Merging adapters into a packed model whose Linear layers bitsandbytes has packed as well."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import training
from bitsandbytes import functional as bnb_functional
from folders import bits
from oracle import factors_of
from small_models import logits
from torch import Tensor, nn
from training import SETTINGS, loaded
from transformers import AutoModelForCausalLM

from moe_qlora.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Merge lora module:UserWarning")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_model("qwen3_moe", moe_intermediate_size=24).save_pretrained(folder)
    return folder


def adapted(source: Path, kind: str = "nf4", targets: Any = ("q_proj", "o_proj")) -> Any:
    model = loaded(source, {**SETTINGS[kind], "bnb_4bit_compute_dtype": torch.float32})
    return training.adapted(model, targets).eval()


def dequantized(layer: Any) -> Tensor:
    """What bitsandbytes itself computes with, in fp32."""
    if isinstance(layer, bnb.nn.Linear8bitLt):
        codes = layer.state.CB if layer.weight.CB is None else layer.weight.CB
        scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
        return codes.float() * scales.view(-1, 1) / 127
    return bnb_functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def expected_linears(model: Any) -> dict[str, Tensor]:
    """Each packed Linear layer's W + s B A in fp32, by its name in the base model."""
    weights, factors = {}, factors_of(model, "default")
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            name = path.removesuffix(".base_layer")
            weights[name] = dequantized(module)
            if f"{name}.weight" in factors:
                a, b = factors[f"{name}.weight"]
                weights[name] = weights[name] + 8 / 3 * (b @ a)
    assert len(weights) >= 8
    return weights


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_dtype_gives_a_plain_model(source, tmp_path, kind):
    model = adapted(source, kind)
    before, expected = logits(model), expected_linears(model)
    merged = model.merge_and_unload(dtype=torch.float32)
    for name, weight in expected.items():
        layer = merged.get_submodule(name)
        assert type(layer) is nn.Linear
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-6, atol=1e-6)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    if kind == "nf4":
        torch.testing.assert_close(logits(merged), before, rtol=1e-5, atol=1e-5)
    assert not hasattr(merged.config, "quantization_config")
    assert not merged.is_loaded_in_4bit and not merged.is_loaded_in_8bit
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(merged.eval()))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("nf4", None), ("int8", None), ("nf4", torch.bfloat16)], ids=str
)
def test_unmerging_restores_every_code(source, kind, dtype):
    model = adapted(source, kind)
    before, codes, expected = logits(model), bits(model), expected_linears(model)
    for _ in range(2):
        model.merge_adapter(dtype=dtype)
        for name, weight in expected.items():
            layer: Any = model.base_model.model.get_submodule(name)
            if hasattr(layer, "base_layer"):
                held = layer.base_layer.weight.detach()
                assert held.dtype == (dtype or torch.float32)
                near = 1e-6 if dtype is None else 2**-8  # half a unit of bfloat16: rounded once
                torch.testing.assert_close(held.float(), weight, rtol=near, atol=1e-6)
        if kind == "nf4" and dtype is None:
            torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
        model.unmerge_adapter()
        assert bits(model) == codes and torch.equal(logits(model), before)
    model.merge_adapter(dtype=dtype)
    with model.disable_adapter():  # which unmerges, as in PEFT
        logits(model)
    assert torch.equal(logits(model), before)


@pytest.mark.filterwarnings("ignore:Already unmerged")
@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp.experts"])
def test_a_broken_adapter_is_not_merged_safely(source, place):
    model = adapted(source, targets=("q_proj",))
    layer = model.base_model.model.model.layers[0].get_submodule(place)
    layer.lora_A["default"].weight.data[0, 0] = float("nan")
    codes = bits(model)
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    assert bits(model) == codes
    model.merge_adapter(dtype=torch.float32)  # As PEFT does, it looks for NaN where it is asked to
