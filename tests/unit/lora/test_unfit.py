"""Linear layers beyond PEFT's LoRA: those that get none, and those whose weight is read."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.nn.utils import parametrize
from training import adapted_layers, packed

import moe_qlora
from moe_qlora.lora.layer import ReadLinear
from moe_qlora.lora.targets import unfit_linears
from moe_qlora.testing import tiny_inputs

UNFIT = {"deepseek_v4": "self_attn.o_a_proj", "nemotron_h": "mixer.out_proj"}


@pytest.mark.parametrize("model_type", UNFIT)
def test_all_linear_leaves_them_out(model_type: str) -> None:
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


class Sum(nn.Module):
    """W + s B A."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        self.a, self.b = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
        self.scale = layer.scaling["default"]

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.b @ self.a


@pytest.mark.filterwarnings("ignore:stock PEFT rewrites")
def test_a_router_whose_weight_is_read_is_trained() -> None:
    torch.manual_seed(0)
    model = packed("longcat_flash").train()
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    reference = copy.deepcopy(model)
    peft_model = moe_qlora.get_peft_model(model, config, router=True)
    inputs = tiny_inputs(model)
    layers = {n: m for n, m in peft_model.named_modules() if isinstance(m, ReadLinear)}
    assert len(layers) == 2
    for name in adapted_layers(peft_model):
        layer = peft_model.get_base_model().get_submodule(name)
        parametrize.register_parametrization(reference.get_submodule(name), "weight", Sum(layer))
    logits, expected = peft_model(**inputs).logits, reference(**inputs).logits
    torch.testing.assert_close(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    for name, layer in layers.items():
        twin = reference.get_submodule(name.removeprefix("base_model.model."))
        ours, theirs = layer.lora_A["default"].weight.grad, twin.parametrizations.weight[0].a.grad
        assert theirs.norm() > 1e-9 and (ours - theirs).norm() < 0.01 * theirs.norm()
    with peft_model.disable_adapter():
        stock = peft_model(**inputs).logits
    assert (logits - stock).abs().max() > 1e-4
    peft_model.merge_adapter()
    torch.testing.assert_close(peft_model(**inputs).logits, logits)


def test_a_weight_that_mambas_kernel_reads() -> None:
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
def test_modules_around_linear_layers_are_left_out_and_said(targets: Any, tmp_path: Path) -> None:
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
        stock = PeftModel.from_pretrained(base, tmp_path)
    assert adapted_layers(again) == adapted_layers(stock) == expected
