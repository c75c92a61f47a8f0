"""What `fit_memory` finds and sets of packed experts in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..memory.blocks import slot_nbytes
from ..memory.budget import Block
from ..memory.devices import gpu_of_device, pace_of
from ..memory.hosting import ExpertLayer, Hosting, Pace, operations
from ..packing.decoders import PackedList
from .offload import Offload, expert_groups, held_tensors, offload_of, tied_lists

_COPIED = 64 << 20  # Bytes of a measured copy: about a millisecond


class HostedExperts:
    """The packed experts of a model, of which `offload_experts` may have moved some."""

    def __init__(self, base: nn.Module) -> None:
        try:
            groups = expert_groups(base)
        except ConfigError:  # Packed by others: they stay where they are
            groups = {}
        self.offload: Offload | None = offload_of(groups)
        self._before = 0 if self.offload is None else len(self.offload.layers)
        self._layers = tuple(_layer(name, lists) for name, lists in groups.items())

    def hosting(self, blocks: Sequence[Block], tokens: int, pace: Pace) -> Hosting:
        """Return what may be in host memory while steps of so many tokens run: what is there now.

        `blocks` are those of the model that run.
        """
        seconds = {block.name: operations(block.active, tokens) / pace.rate for block in blocks}
        return Hosting(self._layers, self._before, pace, seconds)

    def slot_memory(self) -> list[Tensor]:
        """Fill the slots on the device, and return their memory."""
        return [] if self.offload is None else self.offload.slot_memory()

    def hold(self, count: int) -> None:
        """Let experts of the last `count` layers be in host memory."""
        if self.offload is not None:
            self.offload.hold(count)

    def restore(self) -> None:
        """Let those be there that were at first."""
        self.hold(self._before)


def _layer(name: str, lists: Sequence[PackedList]) -> ExpertLayer:
    held = [held_tensors(same[0]) for same in tied_lists(lists)]
    nbytes = sum(tensor.nbytes for tensors in held for tensor in tensors)
    return ExpertLayer(name, nbytes, sum(map(slot_nbytes, held)))


def pace(device: torch.device) -> Pace:
    """Return how quick a device is: its copies measured once on CUDA, the rest an estimate."""
    if device.type != "cuda":
        return Pace()
    known = pace_of(gpu_of_device(torch.cuda.get_device_name(device)))
    return Pace(_link(device.index or 0), known.rate)


@cache
def _link(index: int) -> float:
    device: Any = torch.device("cuda", index)
    source = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.device(device):
        to, times = torch.empty_like(source, device=device), []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            to.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return _COPIED / (min(times) * 1e-3)
