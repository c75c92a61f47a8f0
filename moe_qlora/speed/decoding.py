"""Records a decoder layer's call for one new token, on a static cache, as a CUDA graph.

`generate` computes one token at a time, in some hundred kernels a layer that each take 2 us of the
GPU and 5 or more of the host. transformers has torch.compile record them, which takes a minute
first and checks some thousand conditions at each token; a graph of each layer does without both.

A graph reads and writes a cache at fixed addresses. `generate` makes a cache for each call: what it
holds is copied to the recorded addresses, and the cache given those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..kernels import workspace
from .recording import Buffers, capture, check_hooks

_STATES = ("keys", "values", "cumulative_length")


def decodes(kwargs: dict[str, Any]) -> bool:
    """Whether a layer is called without gradients on a static cache that stays on the device."""
    cache: Any = kwargs.get("past_key_values")
    return (
        type(cache) is StaticCache
        and not getattr(cache, "offloading", False)  # which moves layers between devices
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()  # whose tensors nothing else may write to
    )


def versions(cache: StaticCache) -> list[int]:
    """Return how often each layer of a cache has been written to."""
    written = (getattr(layer, "keys", None) for layer in cache.layers)
    return [-1 if keys is None else keys._version for keys in written]


def is_recordable(cached: Any) -> bool:
    """Whether the next token's update of a cache's layer is the same kernels at each token."""
    if not cached.is_initialized:  # it holds nothing before a prompt's first token
        return False
    if type(cached) is StaticSlidingWindowLayer:  # once it is full, it is copied on the host's word
        return bool(cached.cumulative_length_int < cached.max_cache_len)
    return type(cached) is StaticLayer


class RecordedDecode:
    """One kind of call of a layer for one new token, as a graph."""

    def __init__(
        self, layer: nn.Module, compute: Callable[[Sequence[Any], Any], Any], shared: Buffers,
        leaves: Sequence[Any], cache: StaticCache, index: int,
    ) -> None:  # fmt: skip
        """Record it; `leaves` are the layer's arguments, but for the cache.

        Raises:
            ObstacleError: The layer has hooks that a graph would skip.
        """
        check_hooks(layer)
        self.shared = shared
        cached: Any = cache.layers[index]
        # Of its own: what the cache has may be another recording's, which moves caches as well.
        self.states: dict[str, Tensor] = {name: getattr(cached, name).clone() for name in _STATES}
        self._place(cached)
        self.graph = torch.cuda.CUDAGraph()
        self.arguments = [
            shared.buffer(("argument", position), leaf.shape, leaf)
            if isinstance(leaf, Tensor)
            else leaf
            for position, leaf in enumerate(leaves)
        ]
        x = leaves[0]
        self.out = shared.buffer("out", x.shape, x)
        length = getattr(cached, "cumulative_length_int", None)
        try:
            with (
                torch.cuda.device(x.device),
                workspace.recorded(x.device),
                capture(self.graph, shared.pool),
            ):
                self.out.copy_(compute(self.arguments, cache))
                self.workspace = workspace.buffers(x.device)
        finally:
            if length is not None:
                cached.cumulative_length_int = length

    def run(self, leaves: Sequence[Any], cached: Any) -> Tensor:
        """Return the layer's output, and bring its layer of the cache up to date."""
        self._adopt(cached)
        self.shared.fill(self.arguments, leaves)
        self.graph.replay()
        workspace.forget(self.out.device)
        if hasattr(cached, "cumulative_length_int"):
            cached.cumulative_length_int += 1
        return self.out.clone()

    def _adopt(self, cached: Any) -> None:
        """Move a cache's layer to the recorded addresses, and what was there out of them."""
        if cached.keys is self.states["keys"]:
            return
        before: Any = self.owner()
        if before is not None and before.keys is self.states["keys"]:
            for name in _STATES:
                setattr(before, name, getattr(before, name).clone())
        for name, state in self.states.items():
            state.copy_(getattr(cached, name))
        self._place(cached)

    def _place(self, cached: Any) -> None:
        for name, state in self.states.items():
            setattr(cached, name, state)
        self.owner = weakref.ref(cached)
