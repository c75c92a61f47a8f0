"""`fit_memory` of a model whose experts lie in host memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import moe_qlora
from moe_qlora.errors import ConfigError
from moe_qlora.planning.choice import LEVELS
from moe_qlora.planning.devices import Pace
from tests.helpers.fitting import (
    adapted,
    equal,
    fitted,
    least_memory,
    measured_peak,
    token_ids,
    train,
)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def places(fit: Any) -> list[tuple[int, bool]]:
    return [(LEVELS.index(layer.activations), layer.experts == "device") for layer in fit.layers]


def test_no_memory_is_exceeded_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model's computing hides no copies.
    monkeypatch.setattr("moe_qlora.train.fit._pace", lambda device: Pace(link=1.0))
    model = adapted("deepseek_v3", num_hidden_layers=4)  # A dense layer first
    ids, weights = token_ids(model), tensors(model)
    resident = train(model, ids)
    model.load_state_dict(weights)
    off = moe_qlora.offload_experts(model)
    layers, host_nbytes = off.layers, off.host_nbytes
    least = least_memory(model)
    with fitted(model) as fit:
        most = fit.peak
        assert set(places(fit)) == {(len(LEVELS) - 1, True)}
        assert (off.layers, off.host_nbytes, off.slots) == ((), 0, 0)
    seen = []
    for part in range(3):
        memory = least + (most - least) * part // 2
        model.load_state_dict(weights)
        with fitted(model, memory) as fit:
            measured = measured_peak(model, torch.zeros_like(ids))
            assert measured <= fit.peak <= min(memory, 1.03 * measured)
            assert equal(train(model, ids), resident)
            host = [layer.name for layer in fit.layers if layer.experts == "host"]
            assert [name.removeprefix("base_model.model.") for name in off.layers] == host
            assert host == [layer.name for layer in fit.layers[len(fit.layers) - len(host) :]]
            seen.append(places(fit))
            counts = f"experts of {len(host)} lie in "
            assert (counts in str(fit) and "; copies " in str(fit)) or not host
        assert (off.layers, off.host_nbytes) == (layers, host_nbytes)
    for few, more in pairwise(seen):
        assert all(a <= c and b <= d for (a, b), (c, d) in zip(few, more, strict=True))
    kept = [sum(on for _, on in each) for each in seen]
    levels = [sum(level for level, _ in each) for each in seen]
    assert kept[0] < len(seen[0]) == kept[-1] and levels[0] < levels[-1]
    assert kept[1] == len(seen[1])  # Experts get the memory first
    off.remove()
    model.load_state_dict(weights)
    assert equal(train(model, ids), resident)


def test_where_nothing_fits_offloading_is_named_only_if_it_helps() -> None:
    model = adapted(num_hidden_layers=6)
    every = least_memory(model)
    with moe_qlora.offload_experts(model):
        least = least_memory(model)
        with pytest.raises(ConfigError, match="experts of 6 in host memory takes") as error:
            fitted(model, least - 1)
        assert "offload_experts" not in str(error.value)
    with moe_qlora.offload_experts(model, layers=3):
        freed = f"would free {least_memory(model) - least} bytes"
        with pytest.raises(ConfigError, match=freed):
            fitted(model, least)
    freed = rf"offload_experts\(model\) would free {every - least} bytes"
    for memory in (every - 1, least):
        with pytest.raises(ConfigError, match=rf"{every - memory} bytes are missing\. .*{freed}"):
            fitted(model, memory)
    with pytest.raises(ConfigError, match="missing") as error:
        fitted(model, least - 1)
    assert "offload_experts" not in str(error.value)
    with moe_qlora.offload_experts(model):
        fitted(model, least).remove()


@pytest.mark.parametrize("first", [0, 1])
def test_both_are_undone_in_either_order(first: int) -> None:
    model = adapted(num_hidden_layers=4)
    ids, weights = token_ids(model), tensors(model)
    resident = train(model, ids)
    off = moe_qlora.offload_experts(model)
    both = fitted(model, least_memory(model)), off
    for undone in (both[first], both[1 - first]):
        undone.remove()
        model.load_state_dict(weights)
        assert equal(train(model, ids), resident)
    assert off.host_nbytes == 0 and not off.layers
