"""Which forward a model runs: what packing changes on its configurations, and what it leaves."""

import copy
from typing import Any

import pytest
import torch
from oracle import Oracle
from peft import LoraConfig, prepare_model_for_kbit_training
from torch import Tensor, nn
from training import NF4, packed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_qlora
from moe_qlora.detection import detect
from moe_qlora.errors import ConfigError, QuantizationError
from moe_qlora.experts import forward
from moe_qlora.testing import tiny_inputs, tiny_model


def experts_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if detect.dispatches(module)}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**tiny_inputs(model)).logits


def test_a_saved_configuration_does_not_name_the_forward(tmp_path):
    model = packed()
    assert model.config._experts_implementation == forward.IMPLEMENTATION
    model.config.save_pretrained(tmp_path)
    assert forward.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert loaded.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "gemma4"])
def test_the_choice_is_made_where_the_experts_module_reads_it(model_type):
    model = packed(model_type)
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
    _, second = experts_of(model)
    moe_qlora.quantize_experts(model, {**NF4, "llm_int8_skip_modules": [second]})
    logits(model)
    assert calls == [model.get_submodule(second)]
    forward.deactivate(model)
    logits(model)
    assert len(calls) == 3


def test_switching_by_transformers_own_call_and_back():
    model = packed()
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
    module = next(iter(experts_of(packed()).values()))
    x, index = torch.randn(6, 64, requires_grad=True), torch.arange(12).view(6, 2) % 4
    call = torch.compile(module, backend="eager") if compiled else module
    # The gradient that comes in is a constant: torch's own decorator lets that through.
    with pytest.raises(QuantizationError, match="first derivatives only, and a second one was"):
        torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x, create_graph=True)
    [grad] = torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    "model_type", ["dbrx", "inkling_text", "jetmoe", "llama4_text", "longcat_flash", "step3p7"]
)
def test_experts_with_a_forward_of_their_own_train_as_plain_ones_do(model_type):
    """In bf16 with all else in fp32, as PEFT prepares a model."""
    model: Any = packed(model_type, dtype=torch.bfloat16)
    oracle = Oracle(copy.deepcopy(model).dequantize().float(), 1e-4)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    oracle.check(model)
    ids = tiny_inputs(model)["input_ids"]
    model.generate(input_ids=ids[:, :3], max_new_tokens=2, pad_token_id=0)
    names = [name for name, _ in model.named_modules() if name.endswith("q_proj")][:1] or None
    model = moe_qlora.get_peft_model(model, LoraConfig(r=2, target_modules=names), experts=True)
    oracle.take(model, "default", 8 / 2)
    oracle.train(model, "default")
