"""CUDA graphs of decoder layers, for training where the GPU waits for the host.

A step of few tokens launches some hundred small kernels a layer, and the host cannot launch them as
fast as the GPU runs them. `graph_layers` records each decoder layer twice and replays it with two
calls of the driver:

    forward    hidden states, rotary embeddings, mask -> the layer's output
    backward   the same, and the output's gradient -> gradients of the hidden states and of the
               layer's trained weights; computes again what the layer does not keep

What a layer keeps (`memory/levels.py`) lies in the graphs' memory pool, which all share. Layers are
recorded in the order in which they run, forwards and then backwards, and are replayed in that
order: so memory that a layer's backward gives back is used again, as in a step without graphs, and
nothing that is kept is overwritten. Another forward before the backward of the first would do so,
and runs without graphs where one of them keeps something. What graphs return is lent, and not
copied (`lent.py`).

    LayerGraphs        the layers of one model, and their shared buffers
      _GraphedLayer    one layer: its `forward` runs a call eagerly, records it or replays it
        RecordedCall   one kind of call (shapes, active adapters, addresses): recording.py
"""

from __future__ import annotations

import copy
import gc
import logging
import traceback
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, first_line
from ..kernels.workspace import in_backward
from ..memory import levels
from . import gathered, recording, segments
from .call_kinds import (
    CallKinds,
    LayerExperts,
    Reserved,
    computing_devices,
    obstacle,
    unflatten,
)
from .fitted import (
    RunsLevels,
    decoder_layers,
    exceeds,
    fitted,
    level_of,
    measures,
    own_forward,
    used_arguments,
)
from .lent import Lender, is_at
from .passes import Passes
from .recording import ObstacleError, RecordedCall, end_recording

_log = logging.getLogger(__name__)

_MOST_KINDS = 4
"""Most recorded kinds of calls of a layer outside flat rows; with more, batches have no length."""
_MOST_FLAT = 8
"""Likewise of flat rows, of which the one that was not run for longest is given up for a ninth."""
_UNKNOWN = object()
"""Of a kind of call that has not come before, of whose calls none is recorded yet: None."""
_EVERY = 4
"""Fewest passes between evaluations that get the graphs' memory: recording takes over a step."""


def graph_layers(model: nn.Module, *, compiled: bool = False, keep: bool = False) -> LayerGraphs:
    """Record the model's decoder layers as CUDA graphs, and train by replaying them.

    For training that waits for the host, in flat rows (flat_rows.py) or batches of one shape.
    The first call of a layer runs eagerly, the second call of its kind is recorded, and later ones
    are replayed. Where the memory given to `fit_memory` holds no step beside what graphs reserve,
    they are given up for the first call of a kind, and recorded anew after it. Calls that cannot be
    recorded run eagerly, and a warning gives the reason once: more than four shapes, a key-value
    cache, gathered outputs other than router logits, foreign hooks, layers that are sharded or
    spread over devices. Nothing is recorded in evaluation.

    What layers keep between forward and backward is what `fit_memory` says, called before or
    after; else backward computes a layer again, whether gradient checkpointing is on or not, or,
    with `keep`, nothing is computed again. Adapters may be switched, disabled, added and saved at
    any time. Gradients are those of the same kernels. Experts in host memory (`offload_experts`,
    called before or after) are read where they are copied to, which no graph does itself. Before
    transformers 5.23 stock gradient checkpointing keeps layers from being recorded: switch it off.

    Call it when the model is complete: after `get_peft_model`, before the training loop or
    `trainer.train()`.

    Args:
        model: A transformers model, or a PEFT model around one, on CUDA.
        compiled: Compile each layer by torch.compile before it is recorded. Layers compiled before
            (`layer.compile()`) stay compiled.
        keep: Keep all that backward needs, in layers that `fit_memory` has not set. Switch gradient
            checkpointing off, which would keep each layer's input a second time.

    Returns:
        The graphs: `remove()`, or the end of a `with` block, removes them.

    Raises:
        ConfigError: The model has no decoder layers on a CUDA device.
    """
    layers = [
        layer
        for layer in decoder_layers(model).values()
        if any(parameter.is_cuda for parameter in layer.parameters())
    ]
    if not layers:
        raise ConfigError(
            f"graph_layers: {type(model).__name__} has no decoder layer on a CUDA device; CUDA "
            "graphs record the kernels of a GPU, so move the model there first."
        )
    return LayerGraphs(model, layers, compiled=compiled, keep=keep)


class LayerGraphs:
    """Decoder layers that run as CUDA graphs."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], *, compiled: bool, keep: bool = False
    ) -> None:
        self.model, self.keep = model, keep
        self.pool = torch.cuda.graph_pool_handle()
        self.passes, self.lender = Passes(), Lender()
        self._buffers: dict[Hashable, Tensor] = {}
        self._sources: dict[int, tuple[Tensor, int]] = {}
        self._warned: set[str] = set()
        self._pool_of = -1  # The pass in which the pool was made
        self._gave_back = -_EVERY  # Count of passes when an evaluation got the memory
        self._gives_up = False  # When the next pass begins
        self._layers = [
            _GraphedLayer(layer, self, compiled, place) for place, layer in enumerate(layers)
        ]

    @property
    def recorded(self) -> int:
        """Number of recorded calls, of two graphs each."""
        return sum(call is not None for layer in self._layers for call in layer.calls.values())

    def remove(self) -> None:
        """Restore the layers' forwards, and free the graphs."""
        for layer in self._layers:
            layer.remove()
        self._layers = []
        self._buffers.clear()
        self._sources.clear()
        self.lender = Lender()

    def __enter__(self) -> LayerGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def buffer(self, role: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the contiguous tensor that all graphs share for this role, shape and dtype."""
        key = role, tuple(shape), like.dtype, like.device
        if key not in self._buffers:
            self._buffers[key] = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        return self._buffers[key]

    def fill(self, buffers: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Copy a call's tensors to the graphs' buffers, except unchanged ones.

        Hidden states come first: they always change, and a reference would keep them alive.
        """
        if not is_at(buffers[0], leaves[0]):
            buffers[0].data.copy_(leaves[0])
        for buffer, leaf in zip(buffers[1:], leaves[1:], strict=True):
            if isinstance(leaf, Tensor):
                source, version = self._sources.get(id(buffer), (None, 0))
                # A reference to the source prevents a new tensor at the same address.
                if source is not leaf or version != leaf._version:
                    # By an alias: autograd would refuse what a recorded backward has of it.
                    buffer.data.copy_(leaf)
                    source = leaf.detach() if leaf.requires_grad else leaf
                    self._sources[id(buffer)] = source, leaf._version

    def enters(self, place: int, *, keeps: bool) -> bool:
        """Note that a layer runs in training; return whether its graphs may run now."""
        before = self.passes.count
        admitted = self.passes.enters(place, keeps=keeps)
        if self._gives_up and self.passes.count > before and not self.passes.is_waiting:
            self._release(for_good=True)
            return False
        return admitted

    def pending(self, call: RecordedCall) -> object:
        """Return an object that lives as long as a recorded call waits for its backward."""
        return self.passes.pending(call)

    def holds_both(self, layer: nn.Module) -> bool:
        """Whether memory holds a step without graphs beside what they reserve."""
        return not (_is_tight(layer) and self.recorded)

    def make_room(self, layer: nn.Module, *, for_good: bool = False) -> None:
        """Before a call without graphs, give back their memory if it does not hold both.

        Nothing is given back while a backward needs it. With `for_good` nothing is recorded later.
        """
        needed = _is_tight(layer) and (for_good or self.recorded)
        if needed and not self.passes.is_waiting:
            self._release(for_good=for_good)

    def make_room_to_evaluate(self, layer: nn.Module) -> None:
        """Do so before an evaluation; but not for one that comes every few steps."""
        if self.passes.count - self._gave_back >= _EVERY and not self.holds_both(layer):
            self._gave_back = self.passes.count
            self.make_room(layer)

    def _release(self, *, for_good: bool) -> None:
        for each in self._layers:
            each.remove() if for_good else each.give_back()
        self.lender.settle()
        self.lender = Lender()
        self._buffers.clear()
        self._sources.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, layer: _GraphedLayer, make: Callable[[], RecordedCall]) -> RecordedCall:
        """Record a call of a layer; after a failure, all layers run eagerly."""
        replays = self.passes.is_replaying
        if replays and not self.holds_both(layer.layer):
            self._gives_up = True
            raise ObstacleError(
                "a mask or another argument that only some layers have was not there before, and "
                "memory does not hold these layers' graphs twice; the graphs are given up"
            )
        pools = {call.pool for each in self._layers for call in each.calls.values() if call}
        if self.pool not in pools or (replays and self._pool_of != self.passes.count):
            # To this pool, memory is free that calls recorded in earlier passes keep tensors in; or
            # torch has given it up, as it does when a pool's last graph is gone.
            self.pool, self._pool_of = torch.cuda.graph_pool_handle(), self.passes.count
            torch.cuda.empty_cache()  # While it records, torch does not give back what it holds
        try:
            made = make()
        except ObstacleError:
            layer.remove()
            raise
        except Exception as error:  # noqa: BLE001 - capture may fail with anything
            device = torch.device(computing_devices(layer.layer)[0])
            raise ObstacleError(self._give_up(device, self.pool, error)) from None
        self.passes.records(made)
        return made

    def record_backward(self, call: RecordedCall, record: Callable[[], None]) -> None:
        """Record a call's backward, unless the graphs were removed meanwhile; likewise."""
        if any(layer.active for layer in self._layers):
            try:
                record()
            except Exception as error:  # noqa: BLE001 - capture may fail with anything
                self.warn(self._give_up(call.x.device, call.pool, error))

    def _give_up(self, device: torch.device, pool: Any, error: Exception) -> str:
        """Let all layers run eagerly after an error in recording; return the reason in words."""
        _log.debug("recording a decoder layer failed", exc_info=error)
        failed: BaseException | None = error
        while failed is not None:  # Frames hold tensors of a recording that is no more
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__context__
        end_recording(device, pool)
        for each in self._layers:
            each.remove()
        return f"recording it failed ({type(error).__name__}: {first_line(error)})"

    def warn(self, reason: str) -> None:
        """Warn that layers run eagerly, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("graph_layers: a decoder layer runs without CUDA graphs: %s.", reason)


class _GraphedLayer(RunsLevels):
    def __init__(self, layer: nn.Module, shared: LayerGraphs, compiled: bool, place: int) -> None:
        self.layer, self.shared, self.place = layer, shared, place
        self.calls: dict[Hashable, RecordedCall | None] = {}
        self._kinds = CallKinds(shared.model, layer)
        self.experts = LayerExperts(layer)
        self.places: Any = None  # Of the experts, when calls were recorded
        found = fitted(layer)
        compiled_before = layer._compiled_call_impl or (found.compiled if found else None)
        self._compiled: Callable[..., Any] | None = compiled_before
        self._run = levels.runner(own_forward(layer), compiles=compiled or bool(compiled_before))
        reason = obstacle(layer)
        self.active = reason is None
        if reason is None:
            layer._compiled_call_impl = None
            layer.forward = self.forward
        else:
            shared.warn(reason)

    def remove(self) -> None:
        """Restore the layer's forward."""
        if self.active:
            self.active = False
            self.layer.__dict__.pop("forward", None)
            self.layer._compiled_call_impl = self._compiled
            if (found := fitted(self.layer)) is not None:
                found.install()
        self.calls.clear()

    def forget(self) -> None:
        self.calls.clear()

    def give_back(self) -> None:
        """Give back the graphs; the next call of a known kind is recorded."""
        self.calls = dict.fromkeys(self.calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GraphedLayer:
        """Return a copy without graphs."""
        ungraphed = copy.copy(self)
        memo[id(self)] = ungraphed
        ungraphed.layer, ungraphed.calls = copy.deepcopy(self.layer, memo), {}
        ungraphed.active = False
        return ungraphed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replay a recorded call; record the second one of its kind."""
        layer = self.layer
        trains = layer.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not self.active:
            return type(layer).forward(layer, *args, **kwargs)
        if not trains:
            own = fitted(layer)
            if own is not None and not layer.training and exceeds(own, args, kwargs):
                self.shared.make_room_to_evaluate(layer)
            return type(layer).forward(layer, *args, **kwargs)
        given, found = kwargs, used_arguments(layer, args, kwargs)
        if found is None:
            self.shared.warn("its key-value cache holds something")
            return type(layer).forward(layer, *args, **given)
        args, kwargs = found
        default = levels.KEEP if self.shared.keep else levels.RECOMPUTE
        level = level_of(layer, args, kwargs, default)
        # In backward, a checkpoint around the layer computes it again: no new pass.
        keeps = level != levels.RECOMPUTE
        again = in_backward()
        admitted = again or self.shared.enters(self.place, keeps=keeps)
        if self.place == 0 and segments.is_alone() and not again:
            self.shared.make_room(self.layer)
        try:
            leaves, structure, kind = self._kinds.describe(args, kwargs)
            may = admitted and self.active and not measures(layer) and segments.records()
            reserved = self._reserve() if may else None
            if reserved is not None:
                call = self._replayable(level, kind, lambda: self._record(leaves, structure, level))
                if call is not None:
                    return gathered.delivered(call.run(leaves))
        except ObstacleError as met:
            self.shared.warn(str(met))
            if fitted(layer) is None and not self.shared.keep:
                return type(layer).forward(layer, *args, **given)
        if not self.shared.holds_both(layer):
            level = levels.RECOMPUTE
        return self._compute(level, args, kwargs, preserve_rng_state=True)

    def _reserve(self) -> Reserved | None:
        """Keep the experts where they are; calls that were recorded elsewhere are forgotten."""
        reserved = self.experts.reserve()
        if reserved is not None and reserved.places != self.places:
            self.places = reserved.places
            self.calls.clear()
        return reserved

    def _replayable(
        self, level: str, kind: Hashable, make: Callable[[], RecordedCall]
    ) -> RecordedCall | None:
        """Return a call's graphs if it may run them now; after a change of level, others."""
        known = self.calls.get(kind, _UNKNOWN)
        call = known if isinstance(known, RecordedCall) else None
        if call is not None and (call.level != level or self.shared.passes.is_outdated(call)):
            call = None
        records = known is not _UNKNOWN
        if segments.running.get() is not None:
            # Their lengths are chosen: only the very first call runs without graphs.
            records = bool(self.calls)
            if known is _UNKNOWN and len(self.calls) >= _MOST_FLAT:
                del self.calls[min(self.calls, key=lambda each: _last_pass(self.calls[each]))]
        elif not records:
            many = len(self.calls) >= _MOST_KINDS
            self.shared.make_room(self.layer, for_good=many)
            if many:
                raise ObstacleError(
                    f"it was called in more than {_MOST_KINDS} ways; train in batches of one fixed "
                    "length"
                )
        if call is None and records:
            call = self.shared.record(self, make)
        if call is not known:
            self.calls[kind] = call
        if call is not None:
            call.last_pass = self.shared.passes.count
        return call

    def _record(self, leaves: Sequence[Any], structure: Hashable, level: str) -> RecordedCall:
        gathers = gathered.asked()

        def compute(arguments: Sequence[Any]) -> tuple[Any, ...]:
            args, kwargs = unflatten(structure, iter(arguments))
            with gathered.gathering(gathers) as logits:
                out = self._compute(level, args, kwargs, preserve_rng_state=False)
            return out, *logits

        with gathered.gathering(False):  # A checkpoint's recomputation in warming up
            return RecordedCall(
                self.layer, compute, self.shared, leaves,
                reserve=partial(self.experts.reserve, self.places), role=structure, level=level,
            )  # fmt: skip

    def _compute(self, level: str, args: Any, kwargs: Any, *, preserve_rng_state: bool) -> Any:
        # In autocast's state of a recording, so that compilers need not compile for two.
        with recording.uncached_autocast():
            return self._run(
                level, (self.layer, *args), kwargs, preserve_rng_state=preserve_rng_state
            )


def _last_pass(call: RecordedCall | None) -> int:
    return -1 if call is None else call.last_pass


def _is_tight(layer: nn.Module) -> bool:
    """Whether the memory of `fit_memory` does not hold a step beside what graphs reserve."""
    found = fitted(layer)
    return found is not None and not found.beside and not found.measures
