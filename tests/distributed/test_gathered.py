"""Layers that FSDP2 gathers at fixed addresses: recorded, they train as one process does."""

from unittest.mock import patch

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


def change_frozen(model):
    """Change weights in place that no optimizer does, one as a checkpoint that is loaded."""
    first, *others = layers_of(model)
    first.state_dict()["input_layernorm.weight"].data.mul_(1.5)
    with torch.no_grad():
        for layer in others:
            layer.input_layernorm.weight.mul_(1.5)


def recorded_run(rank, world, level, once):
    """Training on a level with graphs; how many calls are recorded; where the layers were.

    Gradients of two micro-batches follow, and of two more after frozen weights were changed; and
    how many parameters are gathered for a step before that, and how many there are.
    """
    model, seen = sharded(small(), reshard_after_forward=not once), []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda layer, *_: seen.append(addresses(layer)), prepend=True)
    with recorded(model, level) as made:
        run = record(model, batches(), rank, world)
        count, places = made.recorded, seen[-LAYERS:]
        summed = accumulated(model, rank, world)
        gathered = gathered_for_a_step(model)
        change_frozen(model)
        changed = accumulated(model, rank, world)
    return run, count, places, summed, gathered, changed


def gathered_for_a_step(model):
    """How many of the layers' parameters FSDP2 gathers for a forward and a backward; all."""
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers_of(model)]
    kind, ids = type(groups[0].fsdp_params[0]), token_ids(small())
    with patch.object(kind, "init_unsharded_param", autospec=True) as gathers:
        model(input_ids=ids, labels=ids).loss.backward()
    of_layers = {id(param) for group in groups for param in group.fsdp_params}
    return sum(id(call.args[0]) in of_layers for call in gathers.call_args_list), len(of_layers)


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
    with pytest.MonkeyPatch.context() as monkeypatch:
        emulate(monkeypatch)
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
    want, sums = record(model, batches(), 0, 1), accumulated(model)[0]
    change_frozen(model)
    after = accumulated(model)[0]
    weights = [weight for layer in layers_of(model) for weight in layer.parameters()]
    trained = sum(weight.requires_grad for weight in weights)
    for runs, _ in ranks:
        run, count, places, (gradients, held), gathered, changed = runs[level, once]
        assert gathered[0] == (trained if once else 2 * gathered[1])
        assert_same_training((run[0], changed[0]), (run[0], after), 1e-4)
        assert_same_training(run, want, 1e-4)
        assert count == LAYERS
        assert_same_training((run[0], gradients), (run[0], sums), 1e-4)
        assert held == once
        # Where one is gathered at a time, all are at the same addresses.
        assert len({tuple(each) for each in places}) == (LAYERS if once else 1)


def test_layers_that_a_caller_gathers_together_are_whole(ranks):
    for _, (right, losses) in ranks:
        assert right and losses == [pytest.approx(losses[0])] * 6
