"""A device whose copies come as late as they may: `moe_qlora.train.offload.Copier` for tests.

A slot holds garbage from when a copy to it is ordered until the computing stream waits for it, so
that a wait too few, or a slot that is given away too early, shows in the numbers. Kernels run at
once: that a copy waits for them is checked by the times of marks, of waits and, in a block of
`Reads`, of each operation that reads a slot.
"""

import threading
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_qlora.train import offload

GARBAGE = 0xFF  # NaN as fp32 statistics


class Delayed:
    """Copies wait in a queue until a stream waits for them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.time = 0
        self.lock = threading.Lock()  # Files are read in threads
        self.queue: list[tuple[int, Tensor, Tensor]] = []
        self.faults: list[str] = []  # An exception would be lost where a lease ends
        self.read: dict[int, int] = {}  # By address: when a stream was last given what reads it
        self.targets: dict[int, int] = {}  # By event: the address that it copies to
        self.made: list[Tensor] = []
        self.missed = 0

    def records(self) -> bool:
        return False

    def tick(self) -> int:
        self.time += 1
        return self.time

    def empty(self, nbytes: int) -> Tensor:
        self.made.append(torch.full((nbytes,), GARBAGE, dtype=torch.uint8))
        return self.made[-1]

    def here(self) -> Any:
        """The computing stream is the device itself."""
        return self

    def record_event(self) -> "Event":
        return Event(self)

    def copy(self, to: Tensor, source: Tensor, after: "Iterable[Event]") -> "Event":
        slot = to.untyped_storage().data_ptr()
        with self.lock:
            event = Event(self)
            if max((one.time for one in after), default=0) < self.read.get(slot, 1):
                self.faults.append("a copy does not wait for what reads the slot, or read it")
            self.read[slot] = 0  # The next copy comes after this one
            to.copy_(torch.full(to.shape, GARBAGE, dtype=torch.uint8))
            self.queue.append((event.time, to, source))
            self.targets[event.time] = slot
        return event

    def wait_event(self, event: "Event") -> None:
        self.missed += event.time == self.time  # It was ordered for this wait, and not ahead
        event.synchronize()
        self.read[self.targets[event.time]] = self.tick()


class Event:
    """All that a device was given until now is done."""

    def __init__(self, device: Delayed) -> None:
        self.device, self.time = device, device.tick()

    def synchronize(self) -> None:
        with self.device.lock:
            while self.device.queue and self.device.queue[0][0] <= self.time:
                _, to, source = self.device.queue.pop(0)
                to.copy_(source)


class Reads(TorchDispatchMode):
    """Notes when operations read slots."""

    def __init__(self, devices: list[Delayed]) -> None:
        super().__init__()
        self.devices, self.count = devices, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and "copy_" not in func.name():
                address = leaf.untyped_storage().data_ptr()
                for device in self.devices:
                    if address in device.read and not func.is_view:
                        self.count += 1
                        device.read[address] = device.tick()
        return func(*args, **(kwargs or {}))


@contextmanager
def delayed(monkeypatch: Any) -> Any:
    """Within the block, slots are on such devices: one in the list each time they are made."""
    made: list[Delayed] = []

    def make(_: torch.device) -> Delayed:
        made.append(Delayed())
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(offload, "Copier", make)
        yield made
    assert not [fault for each in made for fault in each.faults]
