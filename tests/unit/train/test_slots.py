"""Slots that are filled ahead of use, on a device whose copies come as late as they may."""

from __future__ import annotations

from typing import Any

from moe_qlora.train.slots import Slots
from tests.helpers.delayed import Delayed, blocks


def value(slot: Any) -> int:
    """The byte that a whole slot holds."""
    first = int(slot.memory[0])
    assert bool((slot.memory == first).all())
    return first


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


def test_a_slot_that_is_leased_keeps_its_block() -> None:
    every, device = blocks(3), Delayed()
    made = Slots(2, 8, device)
    slot, lease = made.fetch(every[0], None)
    other, _ = made.fetch(every[2], None)  # Whose slot is the same one
    assert lease is not None and other is not slot
    assert (value(slot), value(other)) == (0, 2)
    del lease
    assert made.fetch(every[2], None)[0] is slot and value(slot) == 2
    assert not device.faults
