"""When graphs of layers may run, so that nothing that is kept for a backward is overwritten."""

from __future__ import annotations

from typing import Any

import pytest

from moe_qlora.speed.passes import Passes


class Call:
    """Stands for a recorded call."""

    def __init__(self, pool: int = 0, keeps: bool = True):
        self.pool, self.keeps = pool, keeps


def test_layers_of_one_pass_run_in_order():
    passes = Passes()
    held = []
    for place in range(4):
        assert passes.enters(place, keeps=True)
        held.append(passes.pending(Call()))
    assert passes.is_kept


def test_a_second_pass_waits_for_the_backward_of_the_first():
    passes = Passes()
    held = [passes.pending(Call()) for place in range(2) if passes.enters(place, keeps=True)]
    assert not passes.enters(0, keeps=True)
    assert not passes.enters(1, keeps=True)
    held.pop()
    # The pass that began before stays without graphs: layers before may have run eagerly.
    assert not passes.enters(2, keeps=True)
    held.clear()
    assert passes.enters(0, keeps=True)
    assert not passes.is_kept


@pytest.mark.parametrize("again", [0, 1])
def test_a_layer_that_runs_twice_begins_a_pass(again: int):
    passes = Passes()
    held = [passes.pending(Call()) for place in range(2) if passes.enters(place, keeps=True)]
    assert held and not passes.enters(again, keeps=True)


def test_calls_of_earlier_passes_are_told_from_those_recorded_now():
    passes, calls = Passes(), [Call(), Call()]
    held: list[Any] = []
    for place, call in enumerate(calls):  # recorded in this pass
        passes.enters(place, keeps=True)
        passes.records(call)
        held.append(passes.pending(call))
        assert not passes.is_replaying
    held.clear()
    passes.enters(0, keeps=True)
    held.append(passes.pending(calls[0]))  # replayed
    assert passes.is_replaying
    held.clear()
    assert not passes.is_replaying


@pytest.mark.parametrize(
    ("pool", "keeps", "outdated"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_calls_of_earlier_passes_may_not_write_where_calls_recorded_now_keep_tensors(
    pool: int, keeps: bool, outdated: bool
):
    passes, earlier = Passes(), Call(0)
    passes.enters(0, keeps=True)
    passes.records(earlier)
    assert not passes.is_outdated(earlier)
    passes.enters(0, keeps=True)
    assert not passes.is_outdated(earlier)
    now = Call(pool, keeps)
    passes.records(now)
    assert passes.is_outdated(earlier) is outdated
    assert not passes.is_outdated(now)
    passes.enters(0, keeps=True)  # the next pass: all are replayed
    assert not passes.is_outdated(earlier)


def test_a_call_that_keeps_nothing_admits_its_like_alone():
    passes = Passes()
    assert passes.enters(0, keeps=False)
    held = passes.pending(Call(keeps=False))
    assert passes.is_waiting and not passes.is_kept and not passes.is_replaying
    assert passes.enters(1, keeps=True)  # of the same pass: recorded in this order
    assert passes.enters(0, keeps=False)
    assert not passes.enters(1, keeps=True)  # whose tensors the first's backward would overwrite
    del held
    assert passes.enters(0, keeps=True)
    other = passes.pending(Call())
    assert other and not passes.enters(0, keeps=False)


def test_passes_are_counted():
    passes = Passes()
    for place in (0, 1, 2, 0, 2, 2):
        passes.enters(place, keeps=True)
    assert passes.count == 2
