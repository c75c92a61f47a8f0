"""Which forward a model runs: what activation changes on its configurations, and what it leaves."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from small_models import fill
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_qlora
from moe_qlora.detection import detect
from moe_qlora.errors import ConfigError, QuantizationError
from moe_qlora.experts import forward
from moe_qlora.packing import codec, parametrize, settings
from moe_qlora.testing import tiny_inputs, tiny_model


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if detect.dispatches(module)}


def pack(model: nn.Module, names: list[str]) -> None:
    for name in names:
        module = model.get_submodule(name)
        for parameter in ("gate_up_proj", "down_proj"):
            stack = codec.pack(getattr(module, parameter), settings.CodecSettings("nf4"))
            parametrize.attach(module, parameter, stack)


def packed_model(model_type: str = "qwen3_moe") -> Any:
    model = tiny_model(model_type)
    names = list(experts_of(model))
    pack(model, names)
    assert forward.activate(model, names) == ()
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**tiny_inputs(model)).logits


def test_a_saved_configuration_does_not_name_the_forward(tmp_path):
    model = packed_model()
    assert model.config._experts_implementation == forward.IMPLEMENTATION
    model.config.save_pretrained(tmp_path)
    assert forward.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert loaded.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "gemma4"])
def test_the_choice_is_made_where_the_experts_module_reads_it(model_type):
    model = packed_model(model_type)
    configs = [module.config for module in experts_of(model).values()]
    assert {each._experts_implementation for each in configs} == {forward.IMPLEMENTATION}
    assert model.config.vision_config._experts_implementation != forward.IMPLEMENTATION
    forward.deactivate(model)
    assert {each._experts_implementation for each in configs} == {"grouped_mm"}


def test_a_skipped_layer_goes_on_with_what_was_chosen_before(monkeypatch):
    calls: list[Any] = []
    probe = lambda module, x, *_: calls.append(module) or x  # noqa: E731
    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "probe", probe)
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("probe")
    first, second = experts_of(model)
    pack(model, [first])
    forward.activate(model, [first])
    logits(model)
    assert calls == [model.get_submodule(second)]
    forward.deactivate(model)
    logits(model)
    assert len(calls) == 3


def test_switching_by_transformers_own_call_and_back():
    model = packed_model()
    ours = logits(model)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), ours)
    model.set_experts_implementation(forward.IMPLEMENTATION)
    assert torch.equal(logits(model), ours)
    forward.deactivate(model)
    assert model.config._experts_implementation == "grouped_mm"


def test_one_ranks_share_of_the_experts_is_refused():
    model = tiny_model("qwen3_moe")
    name, module = next(iter(experts_of(model).items()))
    module._is_expert_parallel = True  # as transformers' plan sets it
    with pytest.raises(ConfigError, match=f"{name} has one rank's experts alone"):
        forward.activate(model, [name])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused(compiled):
    module = next(iter(experts_of(packed_model()).values()))
    x, index = torch.randn(6, 64, requires_grad=True), torch.arange(12).view(6, 2) % 4
    call = torch.compile(module, backend="eager") if compiled else module
    # The gradient that comes in is a constant: torch's own decorator lets that through.
    with pytest.raises(QuantizationError, match="first derivatives only, and a second one was"):
        torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x, create_graph=True)
    [grad] = torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x)
    assert grad.isfinite().all()


CONFIG = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
OWN_FORWARD = ("dbrx", "inkling_text", "jetmoe", "llama4_text", "longcat_flash", "step3p7")


def packed_pair(model_type: str) -> tuple[Any, Any]:
    """A packed bf16 model with all else in fp32, and the same weights in plain fp32."""
    model = tiny_model(model_type, dtype=torch.bfloat16)
    moe_qlora.quantize_experts(model, CONFIG)
    plain = copy.deepcopy(model).dequantize().float()
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), plain


def adapted(model: Any, packed: bool) -> Any:
    """The model with LoRA that counts, by this package or by stock PEFT."""
    names = [name for name, _ in model.named_modules() if name.endswith("q_proj")][:1] or None
    if packed:
        config = LoraConfig(r=2, target_modules=names)
        return fill(moe_qlora.get_peft_model(model, config, experts=True), size=0.05)
    weights = sorted(param.name for param in moe_qlora.detect(model).experts)
    config = LoraConfig(r=2, target_modules=names, target_parameters=weights)
    return fill(peft.get_peft_model(model, config), size=0.05)


@pytest.mark.parametrize("model_type", OWN_FORWARD)
def test_packed_experts_compute_as_plain_ones_do_in_fp32(model_type):
    """Outputs, and the gradients of LoRA that stock PEFT has."""
    model, plain = packed_pair(model_type)
    inputs = tiny_inputs(plain)
    with torch.no_grad():
        expected = plain(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        model.generate(input_ids=inputs["input_ids"][:, :3], max_new_tokens=2, pad_token_id=0)
    if model_type == "dbrx":  # whose experts' weights are read from outside: stock PEFT cannot
        return
    gradients = []
    for each in (adapted(model, True), adapted(plain, False)):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    assert any("experts" in name or "linear" in name for name in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_lora_on_experts_that_are_read_from_outside_is_the_merged_weight():
    model, plain = packed_pair("dbrx")
    assert model.transformer.blocks[0].ffn.experts.mlp.w1.dtype == torch.bfloat16  # Its own
    inputs = tiny_inputs(plain)
    model = adapted(model, True)
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if ".lora_" in n)
    with torch.no_grad():
        merged = model.merge_and_unload(dtype=torch.float32)(**inputs)
    torch.testing.assert_close(out.logits, merged.logits, rtol=1e-4, atol=1e-5)
