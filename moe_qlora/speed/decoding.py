"""CUDA graphs of a decoder layer's calls for one new token of `generate`, on a static cache.

A token takes some hundred kernels a layer, 2 us each on the GPU and 5 or more on the host;
torch.compile, transformers' way, compiles for a minute first and checks some thousand conditions at
each token.

A graph reads and writes a cache at fixed addresses, and `generate` makes a cache for each call: its
content is copied to the recorded addresses, and the cache is then given those tensors.
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

_COMPILES = "_valid_auto_compile_criteria"
"""transformers' method that decides whether `generate` compiles a model."""


def decodes(kwargs: dict[str, Any]) -> bool:
    """True for a call without gradients on a static cache that stays on the device."""
    cache: Any = kwargs.get("past_key_values")
    return (
        type(cache) is StaticCache
        and not getattr(cache, "offloading", False)  # which moves layers between devices
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()  # its tensors are read-only elsewhere
    )


def versions(cache: StaticCache) -> list[int]:
    """Return the version counter of each cache layer; -1 if it is not initialized."""
    written = (getattr(layer, "keys", None) for layer in cache.layers)
    return [-1 if keys is None else keys._version for keys in written]


def is_recordable(cached: Any) -> bool:
    """True if the update of a cache layer runs the same kernels for each token."""
    if not cached.is_initialized:  # before a prompt's first token
        return False
    if type(cached) is StaticSlidingWindowLayer:  # the host decides on copies once it is full
        return bool(cached.cumulative_length_int < cached.max_cache_len)
    return type(cached) is StaticLayer


class Compilation:
    """Lets `generate` compile a model on request, or where none of its layers is recorded."""

    def __init__(self, model: nn.Module, is_recorded: Callable[[], bool]) -> None:
        modules = [module for module in model.modules() if hasattr(module, _COMPILES)]
        self._before = [(module, vars(module).get(_COMPILES)) for module in modules]
        self._is_recorded = is_recorded
        for module, _ in self._before:
            setattr(module, _COMPILES, self._criterion(getattr(module, _COMPILES)))

    def _criterion(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def compiles(model_kwargs: Any, generation_config: Any) -> Any:
            asked = getattr(generation_config, "compile_config", None) is not None
            return (asked or not self._is_recorded()) and before(model_kwargs, generation_config)

        return compiles

    def restore(self) -> None:
        """Let transformers decide again."""
        for module, criterion in self._before:
            vars(module).pop(_COMPILES, None)
            if criterion is not None:
                setattr(module, _COMPILES, criterion)
        self._before = []


class RecordedDecode:
    """One kind of call of a layer for one new token, as a graph."""

    def __init__(
        self, layer: nn.Module, compute: Callable[[Sequence[Any], Any], Any], shared: Buffers,
        leaves: Sequence[Any], cache: StaticCache, index: int,
    ) -> None:  # fmt: skip
        """Record it; `leaves` are the layer's arguments without the cache.

        Raises:
            ObstacleError: The layer has hooks that a graph would skip.
        """
        check_hooks(layer)
        self.shared = shared
        cached: Any = cache.layers[index]
        # Clones: the cache's tensors may belong to another recording.
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
                capture(self.graph, shared.token_pool),
            ):
                self.out.copy_(compute(self.arguments, cache))
                self.workspace = workspace.buffers(x.device)
        finally:
            if length is not None:
                cached.cumulative_length_int = length

    def run(self, leaves: Sequence[Any], cached: Any) -> Tensor:
        """Return the layer's output, and update its cache layer."""
        self._adopt(cached)
        self.shared.fill(self.arguments, leaves)
        self.graph.replay()
        workspace.forget(self.out.device)
        if hasattr(cached, "cumulative_length_int"):
            cached.cumulative_length_int += 1
        return self.out.clone()

    def _adopt(self, cached: Any) -> None:
        """Copy a cache layer to the recorded addresses; the layer there before gets clones."""
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
