"""Packed models over two GPUs of one process: even, complete, and as right as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_qlora.packing import parametrize
from tests.helpers.plans import plan
from tests.helpers.training import NF4, adapted, loaded

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "model"
    config = Qwen3MoeConfig(
        num_hidden_layers=16, num_experts=32, num_experts_per_tok=4, hidden_size=512,
        moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def load(folder: Path, device_map: Any, settings: dict[str, Any] | None = None) -> Any:
    given = settings or NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16}
    return loaded(folder, given, device_map=device_map, dtype=torch.bfloat16)


def assert_even(model: Any) -> None:
    """Bytes by device, statistics included; and everything of a layer is on one device."""
    total = {0: 0, 1: 0}
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    for _, module, name in parametrize.iter_packed(model):
        for tensor in parametrize.read_packed(module, name).statistics:
            tensors[tensor.data_ptr()] = tensor
    for tensor in tensors.values():
        assert tensor.device.type == "cuda"
        total[tensor.device.index] += tensor.nbytes
    assert max(total.values()) < 1.15 * sum(total.values()) / 2
    for layer in model.model.layers:
        places = {t.device for t in (*layer.parameters(), *layer.buffers())}
        for _, module, name in parametrize.iter_packed(layer):
            stack = parametrize.read_packed(module, name)
            places |= {t.device for t in (stack.codes, *stack.statistics)}
        assert len(places) == 1


def train(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tuned = adapted(model).train()
    loss = tuned(ids, labels=ids).loss
    loss.backward()
    grads = [p.grad.cpu() for p in tuned.parameters() if p.grad is not None]
    return loss.detach().cpu(), grads


@pytest.mark.parametrize("settings", [None, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_two_devices_compute_what_one_does(folder: Path, settings: Any) -> None:
    ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0)).cuda(0)
    loss, grads = train(load(folder, {"": 0}, settings), ids)
    other, others = train(load(folder, "auto", settings), ids)
    torch.testing.assert_close(loss, other, rtol=1e-3, atol=1e-3)
    assert len(grads) == len(others) > 0
    for one, two in zip(grads, others, strict=True):
        scale = one.float().norm().clamp_min(1e-6)
        assert (one.float() - two.float()).norm() / scale < 0.05


def test_a_packed_model_is_planned_and_dispatched_evenly(folder: Path) -> None:
    from accelerate import dispatch_model

    model = load(folder, {"": 0})
    ids = torch.arange(32, device="cuda:0")[None]
    before = model(ids).logits
    made = plan(model, gpus="2x24GiB", seq=64)
    model = dispatch_model(model, made.device_map)
    assert_even(model)
    assert_even(load(folder, "auto"))
    torch.testing.assert_close(model(ids).logits.to(before.device), before, rtol=0.02, atol=0.05)
