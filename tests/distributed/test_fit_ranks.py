"""`fit_memory` on two ranks: one choice, one error, and training as in one process.

Two processes serve every case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import moe_qlora
from moe_qlora.testing import run_distributed
from tests.helpers.fitting import BATCH, ENOUGH, adapted, fitted, least_memory, token_ids
from tests.helpers.ranks import sharded
from tests.helpers.training import train

LAYERS = 4  # Of the model whose experts lie in host memory


def batches() -> list[torch.Tensor]:
    return [token_ids(adapted(), batch=BATCH * 2, seed=seed) for seed in range(3)]


def ways(rank: int, world: int, memories: tuple[int, int], least: int) -> dict[str, Any]:
    """What each way of calling gives on this rank: levels and losses, or an error."""
    results: dict[str, Any] = {}

    def note(name: str, run: Any) -> None:
        try:
            results[name] = run()
        except moe_qlora.ConfigError as error:
            results[name] = str(error)
        distributed.barrier()

    def trained(before: Any, after: Any) -> Any:
        model = before(adapted())
        fit = fitted(model, memories[rank])
        levels = [layer.activations for layer in fit.layers]
        return levels, train(after(model), batches(), rank, world)

    def same(model: Any) -> Any:
        return model

    def offloaded() -> Any:
        model = adapted(num_hidden_layers=LAYERS)
        off = moe_qlora.offload_experts(model)
        fit = fitted(model, (ENOUGH, least)[rank])
        experts = [layer.experts for layer in fit.layers]
        losses = train(ddp(model), batches(), rank, world)
        fit.remove()
        return experts, losses, len(off.layers)

    ddp = DistributedDataParallel
    note("offloaded, before DDP", offloaded)
    note("after DDP", lambda: trained(ddp, same))
    note("before FSDP2", lambda: trained(same, sharded))
    note("after FSDP2", lambda: trained(sharded, same))
    note("too small on one", lambda: fitted(adapted(), (ENOUGH, 1)[rank]).remove())
    note("no size on one", lambda: fitted(adapted(), (ENOUGH, "abc")[rank]).remove())
    return results


@pytest.fixture(scope="module")
def ranks() -> Any:
    model = adapted()
    least = least_memory(model)
    with fitted(model, ENOUGH) as fit:
        most = fit.peak
    large = adapted(num_hidden_layers=LAYERS)
    with moe_qlora.offload_experts(large):
        tight = least_memory(large)
    return run_distributed(ways, 2, (most, least + (most - least) // 4), tight)


@pytest.mark.parametrize("way", ["after DDP", "before FSDP2"])
def test_all_ranks_decide_alike_and_train_as_one(ranks: Any, way: str) -> None:
    expected = train(adapted(), batches())
    for levels, losses in (rank[way] for rank in ranks):
        assert levels == ["part", "keep"]  # what fits the smaller memory
        assert losses == pytest.approx(expected, rel=1e-5)


def test_all_ranks_have_as_many_experts_in_host_memory(ranks: Any) -> None:
    expected = train(adapted(num_hidden_layers=LAYERS), batches())
    for experts, losses, after in (rank["offloaded, before DDP"] for rank in ranks):
        assert experts == ["host"] * LAYERS and after == LAYERS
        assert losses == pytest.approx(expected, rel=1e-5)


def test_an_error_on_one_rank_is_one_on_all(ranks: Any) -> None:
    assert all("are missing" in rank["too small on one"] for rank in ranks)
    assert "failed on another rank" in ranks[0]["no size on one"]
    assert "is no size" in ranks[1]["no size on one"]


def test_a_sharded_model_is_refused(ranks: Any) -> None:
    assert all("call fit_memory before fully_shard" in rank["after FSDP2"] for rank in ranks)
