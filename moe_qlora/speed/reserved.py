"""Packed experts at fixed addresses, for recorded calls of a decoder layer.

A CUDA graph reads experts where they were when it was recorded: on the device, or in a layer's slot
(slots.py). While it is recorded or replayed, its call holds a `Reserved`, which has waited for the
copy to the slot before, and whose end lets the slot be filled again. Experts that have moved since,
to host memory or back, are found at other places: the call is then recorded anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import nn

from ..packing.packed_list import PackedList


class Reserved(NamedTuple):
    """Experts that stay where they are as long as this is referenced."""

    places: tuple[Hashable, ...]  # Equal where all are at the same addresses
    leases: list[object]


class LayerExperts:
    """The packed experts of one decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._lists = [module for module in layer.modules() if isinstance(module, PackedList)]

    def reserve(self, places: tuple[Hashable, ...] | None = None) -> Reserved | None:
        """Keep the experts where they are.

        None where they are not at `places`, if given, or where others hold their slot just now.
        """
        found: list[Hashable] = [each.moves for each in self._lists]
        leases: dict[int, object] = {}
        for each in self._lists:
            host = each.host
            if host is not None and id(host.layer) not in leases:
                place, leases[id(host.layer)] = host.reserve(each)
                if place is None:
                    return None
                found.append(place)
        if places not in (None, tuple(found)):
            return None
        return Reserved(tuple(found), list(leases.values()))


def computing_devices(layer: nn.Module) -> list[str]:
    """Return the devices that compute a layer: not those of experts in host memory."""
    lists = [module for module in layer.modules() if isinstance(module, PackedList)]
    devices = {str(each.host.device) for each in lists if each.host is not None}
    tensors = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    for each in lists:
        if each.host is not None:
            for tensor in (*each.parameters(), *each.buffers()):
                tensors.pop(id(tensor), None)
    return sorted(devices | {str(tensor.device) for tensor in tensors.values()})
