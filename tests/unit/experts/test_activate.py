"""Which forward a model runs: what activation changes on its configurations, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**tiny_inputs(model)).logits
    return out


def test_a_saved_configuration_does_not_name_the_forward(tmp_path: Path) -> None:
    model = packed_model()
    assert model.config._experts_implementation == forward.IMPLEMENTATION
    assert forward.IMPLEMENTATION not in str(model.config.to_dict())
    assert forward.IMPLEMENTATION not in str(model.config.to_diff_dict())
    model.config.save_pretrained(tmp_path)
    assert forward.IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert loaded.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "gemma4"])
def test_the_choice_is_made_where_the_experts_module_reads_it(model_type: str) -> None:
    model = packed_model(model_type)
    for module in experts_of(model).values():
        assert module.config is not model.config
        assert module.config._experts_implementation == forward.IMPLEMENTATION
    assert model.config.vision_config._experts_implementation != forward.IMPLEMENTATION
    forward.deactivate(model)
    for module in experts_of(model).values():
        assert module.config._experts_implementation == "grouped_mm"


def test_a_skipped_layer_goes_on_with_what_was_chosen_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    probe = lambda module, hidden_states, *_: (calls.append(module), hidden_states)[1]  # noqa: E731
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


def test_switching_by_transformers_own_call_and_back() -> None:
    model = packed_model()
    ours = logits(model)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), ours)
    model.set_experts_implementation(forward.IMPLEMENTATION)
    assert torch.equal(logits(model), ours)
    forward.deactivate(model)
    assert model.config._experts_implementation == "grouped_mm"


def test_one_ranks_share_of_the_experts_is_refused() -> None:
    model = tiny_model("qwen3_moe")
    name, module = next(iter(experts_of(model).items()))
    module._is_expert_parallel = True  # as transformers' plan sets it
    with pytest.raises(ConfigError, match=f"{name} has one rank's experts alone"):
        forward.activate(model, [name])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused(compiled: bool) -> None:
    module = next(iter(experts_of(packed_model()).values()))
    x, index = torch.randn(6, 64, requires_grad=True), torch.arange(12).view(6, 2) % 4
    call = torch.compile(module, backend="eager") if compiled else module
    # The gradient that comes in is a constant: torch's own decorator lets that through.
    with pytest.raises(QuantizationError, match="first derivatives only, and a second one was"):
        torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x, create_graph=True)
    [grad] = torch.autograd.grad(call(x, index, torch.rand(6, 2)).sum(), x)
    assert grad.isfinite().all()
