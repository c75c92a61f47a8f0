"""How often each expert is used, against the router's own choice token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from small_models import MODELS, build, lora_config

import moe_qlora
from moe_qlora import testing
from moe_qlora.errors import ConfigError, DetectionError

IDS = torch.randint(0, 48, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(3, 7, dtype=torch.int64).index_fill(0, torch.tensor([2]), 0)


def recorded(model: Any, names: Iterable[str], *batches: dict[str, Any]) -> list[list[int]]:
    """List, one assignment after the other, what each layer's experts are called with."""
    lists = []
    for name in names:
        experts = model.get_submodule(name)
        counts: list[int] = []
        lists.append(counts)

        def note(module: Any, args: Any, kwargs: Any, counts: list[int] = counts) -> None:
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            if index is None:
                index = kwargs["router_indices"]
            for row in index.tolist():
                counts.extend(row)

        experts.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    return lists


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"llama4_text"}))
def test_counts_are_those_of_the_router(model_type: str) -> None:
    model = build(model_type)
    use = moe_qlora.expert_use(model, [{"input_ids": IDS, "labels": IDS}, IDS[:1]])
    expected = recorded(model, use, {"input_ids": IDS}, {"input_ids": IDS[:1]})
    assert len(use) == len(expected)
    for counts, seen in zip(use.values(), expected, strict=True):
        assert counts.tolist() == [seen.count(expert) for expert in range(len(counts))]
        assert int(counts.sum()) == 28 * 2


def test_padding_adapters_and_what_is_left_behind() -> None:
    model = moe_qlora.get_peft_model(build(), lora_config())
    model.train()
    model.base_model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    use = moe_qlora.expert_use(model, [{"input_ids": IDS, "attention_mask": MASK}])
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    other = moe_qlora.expert_use(model.eval(), [IDS[:2]])
    assert list(use) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for name, counts in use.items():
        assert torch.equal(counts, other[name])
        assert int(counts.sum()) == 14 * 2


def test_unpacked_models_count_alike() -> None:
    model = testing.tiny_model("mixtral")
    before = moe_qlora.expert_use(model, [testing.tiny_inputs(model)])
    assert all(int(counts.sum()) == 24 * 2 for counts in before.values())


def test_hot_experts_are_the_most_used() -> None:
    use = {"a": torch.tensor([3, 9, 0, 9, 4]), "b": [0, 0, 0, 0]}
    assert moe_qlora.hot_experts(use) == {"a": [1, 3], "b": [0]}
    assert moe_qlora.hot_experts(use, share=0.6) == {"a": [1, 3, 4], "b": [0, 1, 2]}
    assert moe_qlora.hot_experts(use, share=1)["a"] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="share is 0"):
        moe_qlora.hot_experts(use, share=0)


def test_what_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="are not told which expert"):
        moe_qlora.expert_use(build("llama4_text"), [IDS])
    with pytest.raises(ConfigError, match="holds no batch"):
        moe_qlora.expert_use(build(), [])
    for batches, what in (
        (IDS, r"a tensor of shape \(7,\)"),  # whose rows are no batches
        ([{"input_ids": [1, 2, 3]}], "a list"),
        ({"input_ids": IDS}, "the str 'input_ids'"),
        ([[1, 2, 3]], r"the list \[1, 2, 3\]"),
    ):
        with pytest.raises(ConfigError, match=what):
            moe_qlora.expert_use(build(), batches)
    with pytest.raises(DetectionError, match="no fused experts"):
        moe_qlora.expert_use(torch.nn.Linear(2, 3), [IDS])
