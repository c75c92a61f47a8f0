"""A decoder layer that keeps for its backward what its level of `memory/levels.py` says.

`FittedLayer` is the forward of one layer, as `fit_memory` sets it. A layer under `graph_layers`
asks `level_of` for each call in its place. Meanwhile `Overrides` switch transformers' gradient
checkpointing off on the model.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..memory import levels
from ..memory.tracker import tensors_of

_log = logging.getLogger(__name__)

_FITTED = "_moe_qlora_fitted"
"""Entry of a layer's `__dict__`: its `FittedLayer`."""

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")
"""Names of a layer's key-value cache, which need not be of transformers' class."""

_ENABLE = "gradient_checkpointing_enable"
_FLAG = "gradient_checkpointing"
_BY = "_moe_qlora_overrides"
"""Attribute of the function that stands in for `_ENABLE`: the `Overrides` that put it there."""


class RunsLevels:
    """A forward of a layer that asks `level_of` itself."""

    def forget(self) -> None:
        """Give back what was recorded of earlier calls."""


class FittedLayer(RunsLevels):
    """The forward of one decoder layer, in place of its own."""

    def __init__(self, layer: Any, level: str, promised: tuple[int, int], warned: set[str]) -> None:
        self.layer, self.level, self.warned = layer, level, warned
        self.promised = promised  # Sequences of a batch, and tokens of each
        self._first = weakref.ref(layer)  # Of a copy still the layer that it was copied from
        self.beside = True  # Whether memory holds a step without graphs beside what they reserve
        self.emptied: weakref.WeakSet[Any] = weakref.WeakSet()  # Caches left empty, of all layers
        self.measures = False  # Whether its steps are measured, and not to be recorded
        self.compiled: Any = None  # What torch.compile had put in the layer's place
        self._before = layer.__dict__.get("forward")
        layer.__dict__[_FITTED] = self
        if isinstance(getattr(self._before, "__self__", None), RunsLevels):
            self._before = None
        else:
            self.install()

    @property
    def is_copy(self) -> bool:
        """Whether it came with a copy of the layer, and nobody has what would remove it."""
        return self._first() is not self.layer

    def install(self) -> None:
        """Put `forward` in the place of the layer's own."""
        layer = self.layer
        layer.forward = self.forward
        self.compiled = layer.__dict__.pop("_compiled_call_impl", None)
        own = own_forward(layer) if self._before is None else self._before
        self._run = levels.runner(own, compiles=self.compiled is not None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; in training, keep what its level says."""
        level = levels.KEEP
        if self.layer.training and torch.is_grad_enabled():
            found = used_arguments(self.layer, args, kwargs)
            if found is not None:
                args, kwargs = found
                level = level_of(self.layer, args, kwargs, level)
        inputs = (self.layer, *args) if self._before is None else args
        return self._run(level, inputs, kwargs)

    def remove(self) -> None:
        """Restore the layer's forward."""
        held = self.layer.__dict__
        if held.get(_FITTED) is self:
            del held[_FITTED]
        if getattr(held.get("forward"), "__self__", None) is self:
            del held["forward"]
            if self._before is not None:
                self.layer.forward = self._before
            if self.compiled is not None:
                self.layer._compiled_call_impl = self.compiled


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


def fitted(layer: nn.Module) -> FittedLayer | None:
    """Return what `fit_memory` has set on a layer."""
    return layer.__dict__.get(_FITTED)


def runs_recorded(layer: nn.Module) -> bool:
    """Whether `graph_layers` records a layer."""
    runs = getattr(layer.__dict__.get("forward"), "__self__", None)
    return isinstance(runs, RunsLevels) and not isinstance(runs, FittedLayer)


def measures(layer: nn.Module) -> bool:
    """Whether `fit_memory` measures a layer, whose calls are not to be recorded."""
    found = fitted(layer)
    return found is not None and found.measures


def level_of(layer: nn.Module, args: Any, kwargs: Any, default: str) -> str:
    """Return the level of a layer's call; `default` where `fit_memory` has set none.

    Calls of more or longer sequences than were promised compute the layer again.
    """
    found = fitted(layer)
    if found is None:
        return default
    said = exceeds(found, args, kwargs)
    if said is None:
        return found.level
    if not torch.compiler.is_compiling() and "tokens" not in found.warned:
        found.warned.add("tokens")
        _log.warning(
            "fit_memory: a batch %s: its layers are computed again in backward, and may take more "
            "memory than was planned.",
            said,
        )
    return levels.RECOMPUTE


def exceeds(layer: FittedLayer, args: Any, kwargs: Any) -> str | None:
    """Return in words what of a call is more than was promised, or None.

    Longer sequences in fewer rows are: attention may take memory by the square of the length. Of
    hidden states (tokens, hidden) the length of sequences is not known.
    """
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor):
        return None
    batch, length = layer.promised
    tokens = x.shape[:2].numel() if x.dim() > 2 else x.shape[0]
    if tokens > batch * length:
        return f"has {tokens} tokens, and {batch * length} were promised (batch_size x seq_len)"
    if x.dim() > 2 and x.shape[1] > length:
        return f"has sequences of {x.shape[1]} tokens, and {length} were promised (seq_len)"
    return None


def used_arguments(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments that a layer uses, without an empty key-value cache.

    Constants that it only hands on, such as `output_hidden_states` and Trainer's
    `num_items_in_batch`, differ between callers, and a layer would be compiled for each.

    None where the cache holds something, or has a fixed size, and the layer writes to it: such a
    call is computed once. A layer that only reads its cache keeps it, and may be computed again.
    """
    from transformers.cache_utils import Cache

    if not torch.compiler.is_compiling():
        own = _parameters(own_forward(layer))
        kwargs = {n: v for n, v in kwargs.items() if n in own or not _is_of_the_stack(n, v)}
    named = [kwargs[name] for name in _CACHES if kwargs.get(name) is not None]
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
    caches = found + [each for each in named if not isinstance(each, Cache)]
    owner = fitted(layer)
    emptied: Any = () if owner is None or torch.compiler.is_compiling() else owner.emptied
    if getattr(layer, "_can_checkpoint_with_cache", False):
        refuse_emptied(emptied, layer, args, kwargs)
        return args, kwargs
    if not caches:
        return args, kwargs
    for cache in caches:
        if cache in emptied:
            continue
        if _holds(cache):
            return None
        if emptied != ():
            emptied.add(cache)

    def kept(value: Any) -> Any:
        return None if any(value is cache for cache in caches) else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


@lru_cache
def _parameters(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _is_of_the_stack(name: str, value: Any) -> bool:
    return name != "is_causal" and isinstance(value, type(None) | bool | int | float | str)


def _holds(cache: Any) -> bool:
    from transformers.cache_utils import Cache

    if not isinstance(cache, Cache):
        return True
    parts = [*vars(cache).values(), *getattr(cache, "layers", ())]
    if any(_holds(part) for part in parts if isinstance(part, Cache)):  # encoder and decoder
        return True
    if any(hasattr(part, "max_cache_len") for part in parts):  # static: the mask has its size
        return True
    held = [vars(part) if hasattr(part, "__dict__") else part for part in parts]
    # Not a sliding window's size, nor positions
    tensors = [tensor for tensor in tensors_of(held) if tensor.is_floating_point()]
    return any(tensor.numel() and tensor.dim() > 1 for tensor in tensors)


def refuse_emptied(emptied: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ConfigError where a cache is given that a training step has left empty."""
    if torch.compiler.is_compiling() or not emptied:
        return
    if any(each in emptied for each in (*args, *kwargs.values())):
        raise ConfigError(
            "fit_memory: this key-value cache is empty, since training steps write none while "
            "fit_memory is on: compute the prefix under torch.no_grad(), or call remove() first."
        )


def release_copy(model: nn.Module) -> None:
    """Let gradient checkpointing be switched on for a copy of a model that has overrides."""
    for host in model.modules():
        if isinstance(getattr(vars(host).get(_ENABLE), _BY, None), Overrides):
            del vars(host)[_ENABLE]


class Overrides:
    """Layers without their own checkpointing, on a model that nothing switches it on for."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._flags = [(layer, vars(layer)[_FLAG]) for layer in layers if _FLAG in vars(layer)]
        for layer, _ in self._flags:
            setattr(layer, _FLAG, False)
        self._hosts = [m for m in model.modules() if callable(getattr(type(m), _ENABLE, None))]
        self._before = [vars(host).get(_ENABLE) for host in self._hosts]
        self._said = False
        for host in self._hosts:
            vars(host)[_ENABLE] = self._does_nothing(host)

    def _does_nothing(self, host: nn.Module) -> Callable[..., None]:
        def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> None:
            if not self._said:
                self._said = True
                _log.warning(
                    "fit_memory has chosen what each layer of %s keeps and computes again: "
                    "enabling gradient checkpointing changes nothing.",
                    type(host).__name__,
                )

        setattr(gradient_checkpointing_enable, _BY, self)
        return gradient_checkpointing_enable

    def remove(self) -> None:
        """Give the layers and the model back what they had."""
        for layer, flag in self._flags:
            setattr(layer, _FLAG, flag)
        for host, before in zip(self._hosts, self._before, strict=True):
            vars(host).pop(_ENABLE, None)
            if before is not None:
                vars(host)[_ENABLE] = before
        self._flags, self._hosts, self._before = [], [], []
