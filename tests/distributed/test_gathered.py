"""Layers that FSDP2 gathers at fixed addresses: recorded, they train as one process does."""

import pytest
import torch

from moe_qlora.planning import levels
from moe_qlora.testing import run_distributed
from tests.helpers.fitting import adapted, token_ids
from tests.helpers.graphed import emulate, recorded
from tests.helpers.ranks import sharded
from tests.helpers.training import assert_same_training, record, whole_gradients

LAYERS = 3


def small():
    model = adapted("qwen3_moe", num_hidden_layers=LAYERS, num_experts=2)
    model.get_base_model().config.use_cache = False
    return model


def batches():
    return [token_ids(small(), batch=4, seed=seed) for seed in range(4)]


def layers_of(model):
    return model.get_base_model().model.layers


def addresses(layer):
    return [parameter.data_ptr() for parameter in layer.parameters()]


def recorded_run(rank, world, level, once):
    """Training on a level with graphs; how many calls are recorded; where the layers were."""
    model, seen = sharded(small(), reshard_after_forward=not once), []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda layer, *_: seen.append(addresses(layer)), prepend=True)
    with recorded(model, level) as made:
        run = record(model, batches(), rank, world)
        count, places = made.recorded, seen[-LAYERS:]
        summed = accumulated(model, rank, world)
    return run, count, places, summed


def accumulated(model, rank=0, world=1):
    """Gradients of two micro-batches, reduced once; whether layers were gathered between them."""
    model.zero_grad()
    for ids, last in zip(batches()[:2], (False, True), strict=True):
        if world > 1:
            model.set_requires_gradient_sync(last)
        ids = ids.chunk(world)[rank]
        model(input_ids=ids, labels=ids).loss.backward()
        if not last:
            weights = [w for layer in layers_of(model) for w in layer.parameters()]
            held = not any(hasattr(weight, "device_mesh") for weight in weights)
    return {n: g.clone() for n, g in whole_gradients(model).items()}, held


def several_at_once(rank):
    """Whether layers are whole that a caller gathers one after the other; losses after it."""
    model = sharded(small())
    ids = token_ids(small(), seed=rank)

    def losses():
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            yield loss.item()

    with recorded(model, levels.KEEP):
        before, layers = [*losses()], layers_of(model)
        shares = [p.full_tensor() for layer in layers for p in layer.parameters()]
        for layer in layers:
            layer.unshard()
        found = [p for layer in layers for p in layer.parameters()]
        right = all(map(torch.equal, found, shares))
        for layer in layers:
            layer.reshard()
        return right, [*before, *losses()]


def run(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        runs = {
            (level, once): recorded_run(rank, world, level, once)
            for level in (levels.KEEP, levels.RECOMPUTE)
            for once in (False, True)
        }
        return runs, several_at_once(rank)


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(run, 2)


@pytest.mark.parametrize("once", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("level", [levels.KEEP, levels.RECOMPUTE])
def test_recorded_shares_train_as_one_process_does(ranks, level, once):
    model = small()
    want, sums = record(model, batches(), 0, 1), accumulated(model)
    for runs, _ in ranks:
        run, count, places, (gradients, held) = runs[level, once]
        assert_same_training(run, want, 1e-4)
        assert count == LAYERS
        assert_same_training((run[0], gradients), (run[0], sums[0]), 1e-4)
        assert held == once
        # Where one is gathered at a time, all are at the same addresses.
        assert len({tuple(each) for each in places}) == (LAYERS if once else 1)


def test_layers_that_a_caller_gathers_together_are_whole(ranks):
    for _, (right, losses) in ranks:
        assert right and losses == [pytest.approx(losses[0])] * 6
