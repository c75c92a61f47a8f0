"""A decoder layer that keeps for its backward what its level of `memory/levels.py` says.

`FittedLayer` is the forward of one layer, as `fit_memory` sets it. A layer under `graph_layers`
asks `level_of` for each call in its place.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import levels

_log = logging.getLogger(__name__)

_FITTED = "_moe_qlora_fitted"
"""Entry of a layer's `__dict__`: its `FittedLayer`."""


class RunsLevels:
    """A forward of a layer that asks `level_of` itself."""


class FittedLayer(RunsLevels):
    """The forward of one decoder layer, in place of its own."""

    def __init__(self, layer: Any, level: str, tokens: int, warned: set[str]) -> None:
        self.layer, self.level, self.tokens, self.warned = layer, level, tokens, warned
        self.before = layer.__dict__.get("forward")
        layer.__dict__[_FITTED] = self
        if not isinstance(getattr(self.before, "__self__", None), RunsLevels):
            layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; in training, keep what its level says."""
        own = type(self.layer).forward if self.before is None else self.before
        inputs = (self.layer, *args) if self.before is None else args
        if not (self.layer.training and torch.is_grad_enabled()):
            return own(*inputs, **kwargs)
        level = level_of(self.layer, args, kwargs, levels.RECOMPUTE)
        return levels.compute(level, own, inputs, without_cache(kwargs))

    def remove(self) -> None:
        """Restore the layer's forward."""
        held = self.layer.__dict__
        held.pop(_FITTED, None)
        if getattr(held.get("forward"), "__self__", None) is self:
            del held["forward"]
            if self.before is not None:
                self.layer.forward = self.before


def fitted(layer: nn.Module) -> FittedLayer | None:
    """Return what `fit_memory` has set on a layer."""
    return layer.__dict__.get(_FITTED)


def level_of(layer: nn.Module, args: Any, kwargs: Any, default: str) -> str:
    """Return the level of a layer's call; `default` where `fit_memory` has set none.

    Calls of more tokens than were promised compute the layer again.
    """
    found = fitted(layer)
    if found is None:
        return default
    x = args[0] if args else kwargs.get("hidden_states")
    if isinstance(x, Tensor) and x.shape[:-1].numel() > found.tokens:
        if not torch.compiler.is_compiling() and "tokens" not in found.warned:
            found.warned.add("tokens")
            _log.warning(
                "fit_memory: a batch has %d tokens, and %d were promised (batch_size x seq_len): "
                "its layers are computed again in backward.",
                x.shape[:-1].numel(),
                found.tokens,
            )
        return levels.RECOMPUTE
    return found.level


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without a key-value cache, which training has no use for."""
    return kwargs | {name: None for name in ("past_key_values", "layer_past") if name in kwargs}
