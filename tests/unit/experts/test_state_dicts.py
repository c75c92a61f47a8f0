"""State dicts of packed models: other storage dtypes, the meta device, crafted statistics."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.packing import parametrize
from moe_qlora.testing import tiny_model

STORAGE = ("uint8", "float16", "bfloat16", "float32")


def loaded(tmp_path: Path, storage: str, seed: int = 0) -> Any:
    """A model whose Linear layers bitsandbytes has packed, and the package its experts."""
    plain = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1, seed=seed)
    folder = tmp_path / f"plain{seed}"
    plain.save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=storage
    )
    with moe_qlora.enabled():
        return type(plain).from_pretrained(folder, quantization_config=config)


def stored(model: Any) -> dict[str, tuple[Any, ...]]:
    return {
        key: (tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for key, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("one", "other"), itertools.product(STORAGE, STORAGE))
def test_codes_of_linear_layers_are_viewed_or_refused(tmp_path, one, other, assign):
    source, target = loaded(tmp_path, one), loaded(tmp_path, other, seed=1)
    before = stored(target)
    if getattr(torch, one).itemsize == getattr(torch, other).itemsize:
        assert str(target.load_state_dict(source.state_dict(), assign=assign)).startswith("<All")
        assert stored(target) == stored(source) != before
        layer = target.model.layers[0].self_attn.q_proj
        assert layer.weight.dtype == getattr(torch, other)
        assert layer.quant_state is layer.weight.quant_state
        return
    with pytest.raises(RuntimeError) as told:
        target.load_state_dict(source.state_dict(), assign=assign)
    for name in ("self_attn.q_proj.weight", "mlp.experts.down_proj"):
        line = next(text for text in str(told.value).splitlines() if f"{name} has" in text)
        assert f"has {one} of" in line and f"has {other} of" in line


@pytest.mark.parametrize("back", ["assign", "empty"])
def test_a_whole_model_goes_to_meta_and_back(tmp_path, back):
    source, model = loaded(tmp_path, "uint8"), loaded(tmp_path, "uint8", seed=1)
    assert model.to("meta") is model
    assert all(parameter.is_meta for parameter in model.parameters())
    if back == "empty":
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=back == "assign")
    assert stored(model) == stored(source)
    for name, layer in source.named_modules():
        if parametrize.is_packed_linear(layer):
            assert type(model.get_submodule(name).weight) is type(layer.weight)
    for (_, mine, name), (_, right, _) in zip(
        parametrize.iter_packed(model), parametrize.iter_packed(source), strict=True
    ):
        assert torch.equal(getattr(mine, name), getattr(right, name))


def test_crafted_statistics_of_a_linear_layer_are_refused(tmp_path):
    model = loaded(tmp_path, "uint8")
    state, before = model.state_dict(), stored(model)
    key = "model.layers.0.self_attn.q_proj.weight.nested_absmax"
    state[key] = state[key][:0]
    with pytest.raises(RuntimeError, match=r"q_proj\.weight has float32 of shape \(0,\) as its"):
        model.load_state_dict(state)
    assert stored(model) == before
