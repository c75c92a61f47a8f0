"""Which calls of a decoder layer CUDA graphs can replay, and which of them are of one kind.

A CUDA graph reads packed experts where they were when it was recorded: on the device, or in a
layer's slot (slots.py). While it is recorded or replayed, its call holds a `Reserved`, which has
waited for the copy to the slot before, and whose end lets the slot be filled again. Experts that
have moved since, to host memory or back, are found at other places: the call is then recorded anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..packing.decoders import PackedList
from . import gathered
from .fitted import FittedLayer
from .recording import ObstacleError

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of constants, which are compared by value."""


def flatten(value: Any, leaves: list[Any]) -> Hashable:
    """Append the tensors and constants of a call's arguments to `leaves`; return their structure.

    torch's pytrees do so as well, and compare structures in Python: 0.3 ms for a layer's call.
    """
    if isinstance(value, tuple | list):
        return (type(value), *[flatten(each, leaves) for each in value])
    if isinstance(value, dict):
        return (dict, tuple(value), *[flatten(each, leaves) for each in value.values()])
    leaves.append(value)
    return None


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the arguments of `flatten` with other leaves."""
    if structure is None:
        return next(leaves)
    kind, *parts = structure
    if kind is dict:
        names, *parts = parts
        return {n: unflatten(part, leaves) for n, part in zip(names, parts, strict=True)}
    values = [unflatten(part, leaves) for part in parts]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


class CallKinds:
    """Describes the calls of one decoder layer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self.model, self.layer = model, layer
        self.adapters: dict[str, int] | None = None
        self._configs: dict[str, Any] = {}  # Referenced: no other gets their ids
        # Where weights and buffers stand: another may be put there (load_state_dict(assign=True))
        self.places: list[tuple[dict[str, Any], str]] = []
        self.tuners: list[Any] = []

    def describe(self, args: Any, kwargs: Any) -> tuple[list[Any], Hashable, Hashable]:
        """Return a call's arguments, their structure, and all that a graph depends on."""
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        if not leaves or not isinstance(leaves[0], Tensor):
            raise ObstacleError("it is not called with its hidden states first")
        shapes: list[Hashable] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if leaf.requires_grad and position:
                    raise ObstacleError("it takes gradients to more than its hidden states")
                # Numbers on the host are read when a call is recorded.
                values = tuple(leaf.tolist()) if leaf.is_cpu and leaf.dim() == 1 else None
                shapes.append((leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, values))
            elif isinstance(leaf, PLAIN):
                shapes.append((type(leaf), leaf))
            else:
                raise ObstacleError(
                    f"it is called with a {type(leaf).__name__} (for a cache: train with "
                    "model.config.use_cache=False; for flex_attention's masks: with sdpa)"
                )
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        kind = structure, tuple(shapes), autocast, gathered.asked(), self._state()
        return leaves, structure, kind

    def _state(self) -> Hashable:
        """Return addresses of the layer's weights, which are trained, and the active adapters."""
        configs = dict(getattr(self.model, "peft_config", {}))
        adapters = {name: id(config) for name, config in configs.items()}
        if adapters != self.adapters:  # Of a name that was deleted and is used again too
            self.adapters, self._configs = adapters, configs
            self.places = [
                (tensors, name)
                for module in self.layer.modules()
                for tensors in (module._parameters, module._buffers)
                for name, tensor in tensors.items()
                if tensor is not None
            ]
            self.tuners = [m for m in self.layer.modules() if hasattr(m, "merged_adapters")]
        found = (tensors.get(name) for tensors, name in self.places)
        weights = tuple((t.data_ptr(), t.requires_grad) for t in found if t is not None)
        active = tuple(
            (
                bool(tuner.disable_adapters),
                tuple(tuner.merged_adapters),
                tuple((name, tuner.scaling.get(name)) for name in tuner.active_adapters),
            )
            for tuner in self.tuners
        )
        return weights, active


def obstacle(layer: nn.Module) -> str | None:
    """Return why no call of a decoder layer can be recorded, or None."""
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    devices = computing_devices(layer)
    if len(devices) > 1:
        return f"it lies on {' and '.join(devices)}"
    replaced = layer.__dict__.get("forward")
    if replaced is not None and not isinstance(getattr(replaced, "__self__", None), FittedLayer):
        return "its forward has been replaced, as accelerate's offloading does"
    sharded = [name for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")]
    if sharded:
        return f"its {sharded[0]} is sharded over ranks"
    return None


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
