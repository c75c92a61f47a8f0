"""Liger's loss in one model: where it is left out, its chunks, and that the model's comes back."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("liger_kernel")

from liger_kernel.transformers import monkey_patch

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
        undo = apply_liger(model) if liger else None
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

    with apply_liger(model):
        monkeypatch.setitem(model.forward.__func__.__globals__, "LigerForCausalLMLoss", loss)
        model(**batch(model), **given)
        model(input_ids=batch(model)["input_ids"])
    assert [options["chunk_mem_const"] for options in asked] == [larger]
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs


def with_adapter(model: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    return get_peft_model(model, config).get_base_model()


def with_codes(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)


def with_loss(model: Any) -> None:
    model.loss_function = lambda *args, **kwargs: torch.tensor(42.0)


def failing(model: Any) -> None:
    def fails(model: Any, **_: Any) -> None:
        model.forward = model.model.forward
        raise ImportError("cannot import name 'Gone'")

    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["qwen3_moe"] = fails


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("qwen3_moe", with_adapter, "the head has LoRA"),
        ("qwen3_moe", with_codes, "the head is quantized"),
        ("qwen3_moe", with_loss, "loss_function was set"),
        ("qwen3_moe", failing, "Liger fails on qwen3_moe .*Gone"),
        ("llama4_text", None, "replaces the forward of all llama4_text models"),
        ("glm4_moe", None, "Liger has no kernels for glm4_moe"),
    ],
)
def test_where_the_loss_stays_the_models(
    model_type: str, change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_types = dict(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN)
    monkeypatch.setattr(monkey_patch, "MODEL_TYPE_TO_APPLY_LIGER_FN", of_types)
    model = tiny_model(model_type)
    if change is not None:
        model = change(model) or model
    before = dict(vars(model)), vars(type(model))["forward"]
    with pytest.raises(ConfigError, match=words):
        apply_liger(model)
    assert (dict(vars(model)), vars(type(model))["forward"]) == before


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_nothing_is_left_behind(model_type: str) -> None:
    model = tiny_model(model_type)
    file = sys.modules[type(model).__module__]

    def everything() -> Any:
        return {name: dict(vars(m)) for name, m in model.named_modules()}, dict(vars(file))

    before = everything()
    with apply_liger(model):
        assert model.forward.__module__.startswith("liger_kernel.")
        assert everything()[1] == before[1]  # Of the next model, too
    assert everything() == before
