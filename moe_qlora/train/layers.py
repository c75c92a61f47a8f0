"""The one owner of a decoder layer's forward in training.

    LayerRunner   in place of the layer's forward, with fields that others set:
      level       what it keeps for its backward (planning/levels.py); `fit_memory` sets it
      graphs      where its calls are recorded and replayed (graphs.py), which sets it
      compiles    whether it runs in code of torch.compile

A runner is put on a layer with the first of these fields, and taken off with the last.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..planning import levels
from ..planning.step import tensors_of

_log = logging.getLogger(__name__)

# Names of a layer's key-value cache, which need not be of transformers' class
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")


class LayerRunner:
    """The forward of one decoder layer, in place of its own."""

    def __init__(self, layer: Any, *, compiles: bool = False) -> None:
        self.layer = layer
        self.level: str | None = None  # None: fit_memory has set none
        self.promised = 0, 0  # Sequences of a batch, and tokens of each; of `level`
        self.warned: list[str] = []  # That a batch exceeds this; of all layers of a model
        self.fits_beside = True  # Whether a step without graphs fits beside their memory
        self.measured = False  # Its steps are measured now, and not recorded
        self.graphs: Any = None  # `LayerGraphs`, or None
        self.calls: Any = None  # The layer's `LayerCalls` there
        self._before = vars(layer).get("forward")  # As accelerate's offloading puts one there
        self._compiled = vars(layer).pop("_compiled_call_impl", None)  # Else it runs in our place
        self.compiles = compiles or self._compiled is not None
        own = own_forward(layer) if self._before is None else self._before
        self._run = levels.runner(own, compiles=self.compiles)
        layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not (layer.training and torch.is_grad_enabled()):
            if self.graphs is not None:  # Batches of evaluation would be compiled anew
                return own_forward(layer)(layer, *args, **kwargs)
            return self.compute(levels.KEEP, args, kwargs)
        found = used_arguments(layer, args, kwargs)
        if found is None:
            return self.compute(levels.KEEP, args, kwargs)
        level = self._level_of(args, found)
        if self.graphs is None or torch.compiler.is_compiling():
            return self.compute(level, args, found)
        return self.graphs.run(self, level, args, found)

    def compute(self, level: str, args: Any, kwargs: Any, **how: Any) -> Any:
        """Compute the layer without graphs."""
        inputs = (self.layer, *args) if self._before is None else args
        return self._run(level, inputs, kwargs, **how)

    def _level_of(self, args: Any, kwargs: Any) -> str:
        """Return the level of a call: more or longer sequences than promised are computed again."""
        # Longer ones in fewer rows are: attention may take memory by the square of the length.
        if self.level is None:
            return levels.RECOMPUTE
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(x, Tensor):
            return self.level
        (batch, length), rows = self.promised, x.dim() > 2
        tokens = x.shape[:2].numel() if rows else x.shape[0]
        if tokens <= batch * length and not (rows and x.shape[1] > length):
            return self.level
        if not torch.compiler.is_compiling() and not self.warned:
            self.warned.append(
                f"has {tokens} tokens in sequences of {x.shape[1] if rows else tokens}, and "
                f"{batch} x {length} were promised (batch_size x seq_len)"
            )
            _log.warning(
                "fit_memory: a batch %s: its layers are computed again in backward, and may take "
                "more memory than was planned.",
                self.warned[0],
            )
        return levels.RECOMPUTE

    def end(self) -> None:
        """Restore the layer's forward, unless it is fitted or recorded still."""
        held = vars(self.layer)
        if self.level is not None or self.graphs is not None:
            return
        if getattr(held.get("forward"), "__self__", None) is self:
            del held["forward"]
            if self._before is not None:
                self.layer.forward = self._before
            if self._compiled is not None:
                self.layer._compiled_call_impl = self._compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerRunner":
        """Return the runner of a copied layer: on the same level, without graphs."""
        memo[id(self)] = twin = copy.copy(self)
        twin.layer = copy.deepcopy(self.layer, memo)
        twin.graphs = twin.calls = None
        return twin


def runner_of(layer: nn.Module) -> LayerRunner | None:
    """Return what runs a layer, if something of this package does."""
    runner = getattr(vars(layer).get("forward"), "__self__", None)
    return runner if isinstance(runner, LayerRunner) else None


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that transformers can compute again, by name: none of a foreign class."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }


def own_forward(layer: nn.Module) -> Any:
    """Return the forward of a layer's class, without transformers' gradient checkpointing."""
    own: Any = type(layer).forward
    return getattr(own, "__wrapped__", own)


def used_arguments(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the named arguments that a layer uses, without an empty key-value cache."""
    # Constants that it only hands on, such as `output_hidden_states` and Trainer's
    # `num_items_in_batch`, differ between callers, and a layer would be compiled for each.
    #
    # None if the cache holds something that the layer adds to, which it may do once, or has no
    # name. A layer that only reads its cache keeps it, and may be computed again.
    from transformers.cache_utils import Cache

    if not torch.compiler.is_compiling():
        own = _parameters(own_forward(layer))
        constant = type(None), bool, int, float, str
        own |= {n for n, v in kwargs.items() if n == "is_causal" or not isinstance(v, constant)}
        kwargs = {n: v for n, v in kwargs.items() if n in own}
    if getattr(layer, "_can_checkpoint_with_cache", False):
        return kwargs
    is_cache = {n for n, v in kwargs.items() if isinstance(v, Cache)} | {*_CACHES}
    caches = [v for n, v in kwargs.items() if n in is_cache and v is not None]
    if any(isinstance(each, Cache) for each in args):
        return None
    if not caches:
        return kwargs
    if not all(isinstance(cache, Cache) and not any(_held(cache)) for cache in caches):
        return None
    return {n: None if n in is_cache else v for n, v in kwargs.items()}


@lru_cache
def _parameters(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _held(cache: Any) -> Iterator[bool]:
    """Yield whether each part of a cache holds tokens, or has a fixed size that masks have too."""
    for layer in getattr(cache, "layers", [cache]):
        yield hasattr(layer, "max_cache_len") or not hasattr(cache, "layers")
        held = [t for t in tensors_of(vars(layer)) if t.is_floating_point() and t.dim() > 1]
        yield any(tensor.numel() for tensor in held)
