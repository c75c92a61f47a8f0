"""Slots that are filled ahead of use, on a device whose copies come as late as they may."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moe_qlora.train.slots import Slots
from tests.helpers.delayed import Delayed, blocks


def value(slot: Any) -> int:
    """The byte that a whole slot holds."""
    first = int(slot.memory[0])
    assert bool((slot.memory == first).all())
    return first


@pytest.mark.parametrize("seed", range(6))
def test_random_fetches_read_what_they_ask_for(seed: int) -> None:
    draw, device, every = random.Random(seed), Delayed(), blocks(6)
    made, held = Slots(draw.choice([1, 2, 3]), 8, device), list[Any]()
    for _ in range(400):
        number = draw.randrange(6)
        slot, lease = made.fetch(every[number], draw.choice([None, *every]))
        held.append((number, slot, lease))
        del slot, lease
        while held and draw.random() < 0.6:
            held.pop(draw.randrange(len(held)))
        if draw.random() < 0.05:
            made.forget(every[number])
        assert all(value(slot) == number for number, slot, _ in held)
    assert not device.faults


def test_a_lease_may_end_in_the_middle_of_a_fetch() -> None:
    """The garbage collector may run anywhere: it finds the lock taken, by this same thread."""
    every = blocks(3)
    held: list[Any] = []

    class Collects(Delayed):
        def copy(self, *args: Any) -> Any:
            held.clear()
            return super().copy(*args)

    device = Collects()
    made = Slots(2, 8, device)
    for number in [0, 1, 2, 1, 0, 2]:
        slot, lease = made.fetch(every[number], every[(number + 1) % 3])
        assert value(slot) == number
        held.append(lease)
        del lease
    assert not device.faults
