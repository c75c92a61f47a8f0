"""FSDP2 on a torch before 2.13, whose two faults are put back here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import BitsAndBytesConfig

import moe_qlora
from moe_qlora.distributed import sharding
from moe_qlora.testing import tiny_model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter(nn.Parameter):
        def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
            return nn.Parameter(data, requires_grad)  # gradients, of integers too

    class Older:
        def __getattr__(self, name: str) -> Any:
            return Parameter if name == "Parameter" else getattr(nn, name)

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        self.orig_dtype, self.reduce_dtype = self.sharded_param.dtype, None
        self.param_dtype = policy.param_dtype  # integers' too

    monkeypatch.setattr(sharding, "_takes_integers", lambda: False)
    monkeypatch.setattr(fsdp_param, "nn", Older())
    monkeypatch.setattr(fsdp_param.FSDPParam, "init_dtype_attrs", init_dtype_attrs)


def logits(mesh: DeviceMesh) -> Tensor:
    """What a packed model gives under FSDP2 in bf16."""
    model = tiny_model("qwen3_moe")
    moe_qlora.quantize_experts(model, BitsAndBytesConfig(load_in_4bit=True))
    moe_qlora.prepare_sharding(model)
    sharding.shard_model(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    result: Tensor = model(input_ids=torch.arange(24).view(2, 12)).logits
    return result.detach()


def test_codes_are_gathered_as_they_are(mesh: DeviceMesh, request: pytest.FixtureRequest) -> None:
    wanted = logits(mesh)
    request.getfixturevalue("older_torch")
    stock = fsdp_param.FSDPParam.__init__
    assert torch.equal(logits(mesh), wanted)
    assert fsdp_param.FSDPParam.__init__ is stock
