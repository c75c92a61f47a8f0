"""State dicts of packed models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import bits
from training import NF4, loaded

from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model


def load(tmp_path: Path, storage: str, seed: int = 0) -> Any:
    """A model whose Linear layers bitsandbytes has packed, and the package its experts."""
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1, seed=seed)
    folder = tmp_path / f"plain{seed}"
    plain.save_pretrained(folder)
    return loaded(folder, {**NF4, "bnb_4bit_quant_storage": storage}, dtype="auto")


def test_a_whole_model_is_loaded(tmp_path):
    source, model = load(tmp_path, "bfloat16"), load(tmp_path, "bfloat16", seed=1)
    assert str(model.load_state_dict(source.state_dict())).startswith("<All")
    assert bits(model) == bits(source)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.quant_state is layer.weight.quant_state
    for (_, mine, name), (_, right, _) in zip(
        parametrize.iter_packed(model), parametrize.iter_packed(source), strict=True
    ):
        assert torch.equal(getattr(mine, name), getattr(right, name))


def test_crafted_statistics_of_a_linear_layer_are_refused(tmp_path):
    model = load(tmp_path, "uint8")
    state, before = model.state_dict(), bits(model)
    key = "model.layers.0.self_attn.q_proj.weight.nested_absmax"
    state[key] = state[key][:0]
    with pytest.raises(RuntimeError, match=r"q_proj\.weight has float32 of shape \(0,\) as its"):
        model.load_state_dict(state)
    assert bits(model) == before
