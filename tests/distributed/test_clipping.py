"""Norms of gradients that lie on meshes of several kinds are those of one process."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moe_qlora
from moe_qlora.testing import run_distributed
from tests.distributed.test_expert_parallel import adapted, batches, packed_model
from tests.helpers.training import whole, whole_gradients

ORDERS = (2.0, 1.0, 0.5, 0.0, math.inf, -math.inf)
CASES = [(order, foreach) for order in ORDERS for foreach in (False, True)]
MAX_NORM = 1e-3


def clipped(model: Any, order: float, foreach: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm of a step's gradients, and what clipping by it leaves of them."""
    rank, world = 0, 1
    if distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    ids = batches()[0].chunk(world)[rank]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    if order < 0:  # the least of all gradients would be the noise of sums that cancel
        for parameter in model.parameters():
            if parameter.grad is not None:
                own = getattr(parameter.grad, "_local_tensor", parameter.grad)
                own.copy_(1 / (own.abs() + 1e-3))
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, order, foreach=foreach)
    return float(whole(norm)), whole_gradients(model)


def run(rank: int, world: int) -> dict[tuple[float, bool], Any]:
    """The experts' factors lie on a mesh of copies and experts, all others on one of all ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "experts"))
    model = adapted(moe_qlora.expert_parallel(packed_model(num_hidden_layers=1), mesh))
    ignored = moe_qlora.expert_parallel_parameters(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=ignored)
    return {case: clipped(model, *case) for case in CASES}


@pytest.fixture(scope="module")
def four() -> Any:
    return run_distributed(run, 4)


@cache
def alone() -> Any:
    return adapted(packed_model(num_hidden_layers=1))


@pytest.mark.parametrize(("order", "foreach"), CASES)
def test_divided_and_sharded_gradients_are_clipped_together(
    four: Any, order: float, foreach: bool
) -> None:
    norm, gradients = clipped(alone(), order, foreach)
    for result in four:
        seen, ours = result[order, foreach]
        assert seen == pytest.approx(norm, rel=1e-4)
        assert ours.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)
