"""Liger's loss in one model: where it is left out, its chunks, and that the model's comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("liger_kernel")

from moe_qlora.errors import ConfigError
from moe_qlora.testing import requires_gpu, tiny_inputs, tiny_model
from moe_qlora.train.liger import apply_liger


def batch(model: Any) -> dict[str, Tensor]:
    ids = tiny_inputs(model)["input_ids"]
    labels = ids.clone()
    labels[:, :1] = -100
    return {"input_ids": ids, "labels": labels}


@requires_gpu(1)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_as_transformers(model_type: str) -> None:
    model: Any = tiny_model(model_type).cuda().train()
    inputs = {name: value.cuda() for name, value in batch(model).items()}
    model.requires_grad_(False)
    weight = model.get_input_embeddings().weight.requires_grad_(True)
    results = []
    for liger in (False, True):
        undo = apply_liger(model, in_layers=False) if liger else None
        weight.grad = None
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.detach(), weight.grad))
        if undo is not None:
            undo.close()
    torch.testing.assert_close(*(loss for loss, _ in results), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(grad for _, grad in results), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("given", "larger"), [({}, 8), ({"chunk_mem_const": 1}, 1)])
def test_chunks_are_larger_unless_the_call_says(
    given: dict[str, int], larger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger's function needs a GPU: here it is asked."""
    model: Any = tiny_model("qwen3_moe").train()
    asked: list[dict[str, Any]] = []

    def loss(**options: Any) -> Tensor:
        asked.append(options)
        return options["hidden_states"].sum()

    with apply_liger(model, in_layers=False):
        monkeypatch.setitem(model.forward.__func__.__globals__, "LigerForCausalLMLoss", loss)
        model(**batch(model), **given)
        model(input_ids=batch(model)["input_ids"])
    assert [options["chunk_mem_const"] for options in asked] == [larger]
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs


def test_heads_of_which_more_is_to_be_read_than_a_weight() -> None:
    model = tiny_model("qwen3_moe")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ConfigError, match="the head has LoRA"):
        apply_liger(adapted.get_base_model(), in_layers=False)
    model = tiny_model("qwen3_moe")
    model.lm_head.bias = nn.Parameter(torch.zeros(model.lm_head.out_features))
    with pytest.raises(ConfigError, match="the head has a bias"):
        apply_liger(model, in_layers=False)
    model = tiny_model("qwen3_moe")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="the head is quantized"):
        apply_liger(model, in_layers=False)
    model = tiny_model("qwen3_moe")
    model.loss_function = lambda *args, **kwargs: torch.tensor(42.0)
    with pytest.raises(ConfigError, match="loss_function was set"):
        apply_liger(model, in_layers=False)


def test_forwards_that_liger_replaces_in_classes_go_back() -> None:
    model = tiny_model("llama4_text")
    cls = type(model)
    before = vars(cls)["forward"]
    with pytest.raises(ConfigError, match="replaces the forward of all llama4_text models"):
        apply_liger(model, in_layers=False)
    assert vars(cls)["forward"] is before and "forward" not in vars(model)


def test_a_hook_of_accelerate_keeps_the_models_loss() -> None:
    model = tiny_model("qwen3_moe")
    add_hook_to_module(model, ModelHook())
    with pytest.raises(ConfigError, match="other code computes the loss"):
        apply_liger(model, in_layers=False)
