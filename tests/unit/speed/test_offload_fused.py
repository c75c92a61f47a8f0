"""Experts in host memory in a GPU's kernels, which run in Triton's interpreter on a late device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.experts import backend, fused
from moe_qlora.testing import tiny_model
from tests.helpers.delayed import Delayed, Reads, delayed
from tests.helpers.fitting import equal, token_ids, train, with_lora

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU is there, and with it the compiled kernels", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("interpreted")
LAYERS = 3


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Delayed]]:
    monkeypatch.setattr(backend, "kernels_run", lambda device: True)
    with delayed(monkeypatch) as made:
        yield made


def packed() -> Any:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS}
    model = tiny_model("qwen3_moe", dtype=torch.float16, **sizes)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    moe_qlora.quantize_experts(model, config)
    return with_lora(model, experts=True)


@pytest.mark.parametrize("reentrant", [None, False])
def test_each_layer_is_copied_once_a_pass(
    reentrant: bool | None, devices: list[Delayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls, run = packed(), [], fused.run
    monkeypatch.setattr(fused, "run", lambda *call: calls.append(1) or run(*call))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    ids = token_ids(model, batch=1, seq=6)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    resident = train(model, ids, 1)
    model.load_state_dict(weights)
    with moe_qlora.offload_experts(model) as off, Reads(devices):
        assert equal(train(model, ids, 1), resident)
        assert off.copies == 2 + 2 * (LAYERS - 2)
    assert len(calls) == 2 * LAYERS * (1 if reentrant is None else 2)
