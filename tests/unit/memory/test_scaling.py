"""Steps on several GPUs by arithmetic: collectives by hand, and what compute hides of them."""

from __future__ import annotations

import pytest

from moe_qlora.memory.devices import GPUS, pace_of
from moe_qlora.memory.hosting import Pace
from moe_qlora.memory.scaling import (
    MEASURED,
    Links,
    Speed,
    Way,
    Work,
    all_to_all,
    compute,
    exposed,
    ring,
    step_seconds,
    trip_bytes,
)

LINKS = Links(200e9, 40e9)
WORK = Work(
    layers=10, expert_layers=8, expert_flops=1e9, other_flops=2e9, layer_bytes=5e9, root_bytes=1e9,
    expert_gradients=8e8, other_gradients=1e8, token_bytes=4000, top_k=8,
)  # fmt: skip


def test_rings_by_hand():
    slow = Links(200e9, 10e9)
    assert ring(8e9, 1, 1, slow) == 0
    assert ring(8e9, 8, 1, slow) == pytest.approx(7e9 / 200e9 + 7 * 3e-6)
    # Two full nodes: eight rings with a card each, which are slower than NVLink here.
    two = 8e9 * 15 / 16 / (8 * 10e9) + 14 * 3e-6 + 2 * 10e-6
    assert ring(8e9, 16, 2, slow) == pytest.approx(two)
    assert ring(8e9, 16, 2, Links(200e9, 50e9)) == pytest.approx(8e9 * 15 / 16 / 200e9 + 62e-6)
    # One rank of each of four nodes, over one card.
    assert ring(8e9, 4, 4, slow) == pytest.approx(8e9 * 3 / 4 / 10e9 + 4 * 10e-6)


def test_groups_that_lie_on_two_machines():
    nodes = Links(200e9, 10e9).nodes
    assert [nodes(n, 16) for n in (2, 4, 8, 16)] == [1, 1, 1, 2]
    assert nodes(6, 6) == 1
    assert nodes(6, 12) == 2  # Ranks 6 and 7 on the first, 8 to 11 on the second
    assert nodes(24, 48) == 3


def test_all_to_all_by_hand():
    slow = Links(200e9, 10e9)
    assert all_to_all(4e9, 4, slow) == pytest.approx(3e9 / 200e9)
    sixteen = 4e9 * 7 / 16 / 200e9 + 4e9 * 8 / 16 / 10e9
    assert all_to_all(4e9, 16, slow) == pytest.approx(sixteen)


def test_what_compute_hides():
    def seconds(engine, gpus, group, busy):
        return exposed(WORK, Way(engine, gpus, group), 1000, busy, LINKS)

    reduced = 2 * ring(9e8, 8, 1, LINKS)
    assert seconds("single", 1, 1, 0.0) == 0
    assert seconds("ddp", 8, 1, 0.0) == pytest.approx(reduced)
    assert seconds("ddp", 8, 1, 0.003) == pytest.approx(reduced - 0.002)
    assert seconds("ddp", 8, 1, 1.0) == 0
    # Of FSDP2 nothing is, but for the sums over copies.
    root = ring(1e9, 8, 1, LINKS)
    layers = 10 * (2 * ring(5e8, 8, 1, LINKS) + ring(9e7, 8, 1, LINKS))
    assert seconds("fsdp", 8, 8, 1.0) == pytest.approx(root + layers)
    sums = 2 * ring(9e8 / 8, 2, 2, LINKS)
    assert seconds("fsdp", 16, 8, 0.0) == pytest.approx(root + layers + sums)
    assert seconds("fsdp", 16, 8, 1.0) == pytest.approx(root + layers)
    # Two groups of four in a machine sum within it.
    inner = seconds("fsdp", 8, 4, 0.0) - seconds("fsdp", 8, 4, 1.0)
    assert inner == pytest.approx(2 * ring(9e8 / 4, 2, 1, LINKS))
    travel = 6 * 8 * (8 * 4000 * 1000) * 7 / 8 / 200e9
    assert seconds("ep", 8, 8, 1.0) == pytest.approx(travel)
    assert seconds("ep", 8, 8, 0.0) == pytest.approx(travel + 2 * ring(1e8, 8, 1, LINKS))


def test_few_ranks_gather_tokens():
    """A trip is then of the hidden states of all ranks, and of top-k of one rank's otherwise."""
    few, more = Way("ep", 4, 4), Way("ep", 8, 8)
    assert (few.cost, more.cost, Way("ep", 4, 4, gathers=False).cost) == (
        "ep", "all-to-all", "all-to-all",
    )  # fmt: skip
    assert trip_bytes(WORK, few, 1000) == 4 * 4000 * 1000
    assert trip_bytes(WORK, more, 1000) == 8 * 4000 * 1000
    gathers = 6 * 8 * ring(4 * 4000 * 1000, 4, 1, LINKS)
    assert exposed(WORK, few, 1000, 1.0, LINKS) == pytest.approx(gathers)


def test_steps_by_hand():
    speed = Speed(1e-3, 100e12, 200e12, {"ddp": 5e-4})
    assert compute(WORK, 1000, speed) == pytest.approx(10e-3 + 1e12 / 100e12 + 2e12 / 200e12)
    step = step_seconds(WORK, Way("ddp", 2, 1), 1000, speed, LINKS)
    assert step == pytest.approx(0.03 + 5e-3)  # gradients are hidden


def test_other_cards():
    pace = pace_of(GPUS["A100-80GB"])
    assert MEASURED.on(pace).experts == pytest.approx(MEASURED.experts * 312 / 989)
    assert MEASURED.on(Pace()) == MEASURED
    assert Links.of(Pace()) == Links(240e9, 45e9, 8)
    assert Links.of(pace).bus == pytest.approx(240e9 * 300 / 450)
    pcie = Links.of(pace_of(GPUS["RTX4090"]), 4)
    assert pcie == Links(pytest.approx(22e9 * 240 / 450), 11.25e9, 4)
