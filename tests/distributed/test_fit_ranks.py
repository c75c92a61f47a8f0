"""`fit_memory` on two ranks: one choice, one error, and training as in one process."""

from functools import partial

import pytest
from torch.nn.parallel import DistributedDataParallel as Ddp

import moe_qlora
from moe_qlora.testing import run_distributed
from tests.helpers import fitting
from tests.helpers.fitting import BATCH, ENOUGH, fitted, least_memory, token_ids
from tests.helpers.ranks import said, sharded
from tests.helpers.training import train

adapted = partial(fitting.adapted, double=True)
HOSTED = partial(adapted, num_hidden_layers=3)  # whose experts lie in host memory


def batches():
    return [token_ids(adapted(), batch=BATCH * 2, seed=seed) for seed in range(2)]


def fitted_peak(model):
    with fitted(model, ENOUGH) as fit:
        return fit.peak


def gathered(model, memory, rank, world):
    """How many layers are gathered once with this memory, and what it leaves for them."""
    with fitted(model, memory) as fit:
        train(model, batches()[:1], rank, world)
        return len(fit._gathered), fit._room


def are_shares(module):
    return all(hasattr(weight, "device_mesh") for weight in module.parameters())


def run(rank, world, memories, least):
    """What each way of calling gives on this rank: choices and losses, or an error."""
    model = adapted()
    found = {"before FSDP2": [layer.activations for layer in fitted(model, memories[rank]).layers]}
    found["before FSDP2, losses"] = train(sharded(model), batches(), rank, world)
    model = HOSTED()
    off, model = moe_qlora.offload_experts(model), Ddp(model)
    fit = fitted(model, (ENOUGH, least)[rank])
    found["offloaded"] = [layer.experts for layer in fit.layers]
    found["offloaded, losses"] = train(model, batches(), rank, world)
    fit.remove()
    found["hosted after it"] = len(off.layers)
    model = sharded(adapted())
    fit = fitted(model, (ENOUGH, fitted_peak(model) - 1)[rank])
    found["after FSDP2"] = [layer.activations for layer in fit.layers]
    found["after FSDP2, losses"] = train(model, batches(), rank, world)
    model = sharded(adapted())
    with fitted(model, ENOUGH) as fit:
        found["gathered once, losses"] = train(model, batches(), rank, world)
        found["gathered once"] = len(fit._gathered), fit.peak
        head = model.get_base_model().lm_head
        found["root after a step"] = are_shares(head)
        model.reshard()
        found["root after a caller's reshard"] = are_shares(head)
        model.eval()(batches()[0])
        layers = model.get_base_model().model.layers
        found["shares after it"] = are_shares(layers)
    found["shares at the end"] = are_shares(model)
    size, model = sum(w.nbytes for w in layers[0].parameters()), sharded(adapted())
    room = gathered(model, ENOUGH, rank, 2)[1]
    just = ENOUGH - room + size
    around = just - size // 2, just + size // 2  # Gloo frees a gather's buffer when it likes
    found["by memory"] = [gathered(model, memory, rank, 2)[0] for memory in around]
    model = sharded(adapted(), reshard_after_forward=False)
    found["a user's own"] = gathered(model, ENOUGH, rank, 2)[0]
    found["too small on one"] = said(fitted, adapted(), (ENOUGH, 1)[rank])
    found["no size on one"] = said(fitted, adapted(), (ENOUGH, "abc")[rank])
    return found


@pytest.fixture(scope="module")
def ranks():
    model = adapted()
    least, most = least_memory(model), fitted_peak(model)
    large = HOSTED()
    with moe_qlora.offload_experts(large):
        tight = least_memory(large)
    return run_distributed(run, 2, (most, least + (most - least) // 4), tight)


def test_all_ranks_decide_alike_and_train_as_one(ranks):
    expected, hosted = train(adapted(), batches()), train(HOSTED(), batches())
    for one in ranks:
        for way in ("before FSDP2", "after FSDP2"):
            assert one[way] == ["part", "keep"]  # what fits the smaller memory
            assert one[f"{way}, losses"] == pytest.approx(expected, rel=1e-5)
        assert one["gathered once"] == (len(one["after FSDP2"]), ranks[0]["gathered once"][1])
        assert one["gathered once, losses"] == pytest.approx(expected, rel=1e-5)
        assert one["shares after it"] and one["shares at the end"]
        assert not one["root after a step"] and one["root after a caller's reshard"]
        assert one["a user's own"] == 0
        assert one["by memory"] == [0, 1]
        assert one["offloaded"] == ["host"] * 3 and one["hosted after it"] == 3
        assert one["offloaded, losses"] == pytest.approx(hosted, rel=1e-5)


def test_an_error_on_one_rank_is_one_on_all(ranks):
    assert all("are missing" in one["too small on one"] for one in ranks)
    assert "failed on another rank" in ranks[0]["no size on one"]
    assert "is no size" in ranks[1]["no size on one"]
