"""What makes two calls of a decoder layer one kind, of which CUDA graphs replay each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from . import gathered, masks
from .recording import ObstacleError


class CallKinds:
    """Describes the calls of one decoder layer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self.model, self.layer = model, layer
        self.adapters: tuple[str, ...] | None = None
        self.tensors: list[Tensor] = []
        self.tuners: list[Any] = []

    def describe(self, args: Any, kwargs: Any) -> tuple[list[Any], masks.Spec, Hashable]:
        """Return a call's arguments, and its kind: everything that a graph depends on."""
        leaves, spec = masks.flatten((args, kwargs))
        shapes: list[Hashable] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if leaf.requires_grad and position:
                    raise ObstacleError("it takes gradients to more than its hidden states")
                shapes.append((leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad))
            elif isinstance(leaf, masks.PLAIN):
                shapes.append((type(leaf), leaf))
            else:
                raise ObstacleError(
                    f"it is called with a {type(leaf).__name__} (for a cache: train with "
                    "model.config.use_cache=False)"
                )
        if not leaves or not isinstance(leaves[0], Tensor):
            raise ObstacleError("it is not called with its hidden states first")
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return leaves, spec, (spec, tuple(shapes), autocast, gathered.asked(), self._state())

    def _state(self) -> Hashable:
        """Return addresses of the layer's weights, which are trained, and the active adapters."""
        adapters = tuple(getattr(self.model, "peft_config", ()))
        if adapters != self.adapters:
            self.adapters = adapters
            self.tensors = [*self.layer.parameters(), *self.layer.buffers()]
            self.tuners = [m for m in self.layer.modules() if hasattr(m, "merged_adapters")]
        weights = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in self.tensors)
        active = tuple(
            (
                bool(tuner.disable_adapters),
                tuple(tuner.merged_adapters),
                tuple((name, tuner.scaling.get(name)) for name in tuner.active_adapters),
            )
            for tuner in self.tuners
        )
        return weights, active
