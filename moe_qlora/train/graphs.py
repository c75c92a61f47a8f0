"""CUDA graphs of decoder layers, for training where the GPU waits for the host.

A step of few tokens launches some hundred small kernels a layer, more slowly than the GPU runs
them. Here, each decoder layer is recorded for each length of flat rows (flat_rows.py), and replayed
with two calls of the driver:

    forward    hidden states, rotary embeddings, segments -> the layer's output, router logits
    backward   the same, and the output's gradient -> gradients of the hidden states and of the
               layer's trained weights; computes again what the layer does not keep

What a layer keeps (`planning/levels.py`) lies in the pool of graphs, which all share. Layers are
recorded in the order in which they run, forwards and then backwards, and are replayed in that
order: so memory that a layer's backward gives back is used again, as in a step without graphs, and
nothing that is kept is overwritten. Another forward before the backward of the first would do so,
and runs without graphs where one of them keeps something. What graphs return is lent, and not
copied (`lent.py`).

A graph reads packed experts where they were when it was recorded: on the device, or in a layer's
slot (slots.py). While it is recorded or replayed, its call holds a `_Reserved`, which has waited
for the copy to the slot, and whose end lets the slot be filled again. Where experts have moved
since, the call is recorded anew.

With `output_router_logits=True`, hooks of transformers append the routers' logits to a list, for
the loss that balances experts. A replay calls no hooks: so a layer is recorded under a list of its
own, and each replay adds its logits to the model's.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from ..errors import first_line
from ..kernels.workspace import in_backward
from ..packing.decoders import PackedList
from ..planning import levels
from . import recording, segments
from .layers import LayerRunner, decoder_layers, runner_of
from .lent import Lender, is_at
from .passes import Passes
from .recording import ObstacleError, RecordedCall, end_recording

_log = logging.getLogger(__name__)

_MOST = 8  # Recorded calls of a layer: the one not run for longest is given up for a ninth
_UNKNOWN = object()  # A kind of call that has not come before; None: one that is not recorded
_LOGITS = "router_logits"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class LayerGraphs:
    """A model's decoder layers as CUDA graphs, and what these share.

    The first call of a layer runs eagerly, for what compilers and libraries do once. So do calls
    that cannot be recorded, and a warning gives the reason once. Adapters may be switched,
    disabled, added and saved at any time. Gradients are those of the same kernels.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.passes, self.lender = Passes(), Lender()
        self._buffers: dict[Hashable, Tensor] = {}
        self._sources: dict[int, tuple[Tensor, int]] = {}
        self._warned: set[str] = set()
        self._pool_of = -1  # The pass in which the pool was made
        layers = decoder_layers(model).values()
        self._runners = [runner_of(each) or LayerRunner(each, compiles=compiled) for each in layers]
        for place, runner in enumerate(self._runners):
            runner.graphs, runner.calls = self, LayerCalls(model, runner.layer, place)

    @property
    def _calls(self) -> list[LayerCalls]:
        return [runner.calls for runner in self._runners if runner.calls is not None]

    @property
    def recorded(self) -> int:
        """Number of recorded calls, of two graphs each."""
        return sum(call is not None for each in self._calls for call in each.known.values())

    def remove(self) -> None:
        """Let the layers run without graphs, and free these."""
        for runner in self._runners:
            runner.graphs = runner.calls = None
            runner.end()
        self._runners = []
        self._buffers.clear()
        self._sources.clear()
        self.lender = Lender()

    def forget(self) -> None:
        """Give back what was recorded."""
        for each in self._calls:
            each.known.clear()

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

    def run(self, runner: LayerRunner, level: str, args: Any, kwargs: Any) -> Any:
        """Run a layer in training: replay its call, record it, or compute it."""
        calls: LayerCalls = runner.calls
        row = segments.running.get()
        # In backward, a checkpoint around the layer computes it again: no new pass.
        again = in_backward()
        admitted = again or self.passes.enters(calls.place, keeps=level != levels.RECOMPUTE)
        if row is not None and row.alone and calls.place == 0 and not again:
            self._make_room(runner)
        if admitted and row is not None and row.recorded and not runner.measured:
            try:
                if (reserved := calls.reserve()) is not None:
                    leaves, structure, kind = calls.describe(args, kwargs)
                    make = partial(self._record, runner, calls, level, leaves, structure)
                    call = self._replayable(calls, kind, level, make)
                    if call is not None:
                        out, *logits = call.run(leaves)
                        del reserved
                        if gathered := output_capturing._active_collector.get():
                            gathered[_LOGITS].extend(logits)  # Not in a recomputation
                        return out
            except ObstacleError as met:
                self.warn(str(met))
        if self.recorded and not (runner.fits_beside or runner.measured):
            level = levels.RECOMPUTE
        return _compute(runner, level, args, kwargs, preserve_rng_state=True)

    def _make_room(self, runner: LayerRunner) -> None:
        """Before a row that memory holds alone, give back graphs, unless a backward needs them."""
        fits = runner.fits_beside or runner.measured
        if fits or not self.recorded or self.passes.is_waiting:
            return
        for each in self._calls:
            each.known = dict.fromkeys(each.known)  # The next call of a known kind is recorded
        self.lender.settle()
        self.lender = Lender()
        self._buffers.clear()
        self._sources.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def _replayable(
        self, calls: LayerCalls, kind: Hashable, level: str, make: Callable[[], RecordedCall]
    ) -> RecordedCall | None:
        """Return a call's graphs if it may run them now; after a change of level, others."""
        known = calls.known.get(kind, _UNKNOWN)
        call = known if isinstance(known, RecordedCall) else None
        if call is not None and (call.level != level or self.passes.is_outdated(call)):
            call = None
        records = bool(calls.known)  # The very first call runs without graphs
        if known is _UNKNOWN and len(calls.known) >= _MOST:
            oldest = min(calls.known, key=lambda k: getattr(calls.known[k], "last_pass", -1))
            del calls.known[oldest]
        if call is None and records:
            call = make()
        if call is not known:
            calls.known[kind] = call
        if call is not None:
            call.last_pass = self.passes.count
        return call

    def _record(
        self,
        runner: LayerRunner,
        calls: LayerCalls,
        level: str,
        leaves: list[Any],
        structure: Hashable,
    ) -> RecordedCall:
        """Record a call of a layer; after a failure, all layers run without graphs."""
        gathers = _gathers_logits()

        def compute(arguments: Sequence[Any]) -> tuple[Any, ...]:
            args, kwargs = unflatten(structure, iter(arguments))
            with _gathering(gathers) as logits:
                out = _compute(runner, level, args, kwargs, preserve_rng_state=False)
            return out, *logits

        pools = {call.pool for each in self._calls for call in each.known.values() if call}
        replays = self.passes.is_replaying
        if self.pool not in pools or (replays and self._pool_of != self.passes.count):
            # To this pool, memory is free that calls recorded in earlier passes keep tensors in; or
            # torch has given it up, as it does when a pool's last graph is gone.
            self.pool, self._pool_of = torch.cuda.graph_pool_handle(), self.passes.count
            torch.cuda.empty_cache()  # While it records, torch does not give back what it holds
        try:
            with _gathering(False):  # A checkpoint's recomputation in warming up
                made = RecordedCall(
                    runner.layer, compute, self, leaves,
                    reserve=partial(calls.reserve_at, calls.places), role=structure, level=level,
                )  # fmt: skip
        except ObstacleError:
            runner.graphs = runner.calls = None
            raise
        except Exception as error:  # noqa: BLE001 - capture may fail with anything
            raise ObstacleError(self._give_up(leaves[0].device, self.pool, error)) from None
        self.passes.records(made)
        return made

    def record_backward(self, call: RecordedCall, record: Callable[[], None]) -> None:
        """Record a call's backward, unless the graphs were removed meanwhile; likewise."""
        if self._calls:
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
        for runner in self._runners:
            runner.graphs = runner.calls = None
        return f"recording it failed ({type(error).__name__}: {first_line(error)})"

    def warn(self, reason: str) -> None:
        """Warn that layers run eagerly, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("prepare_training: a decoder layer runs without CUDA graphs: %s.", reason)


def _compute(runner: LayerRunner, level: str, args: Any, kwargs: Any, **how: Any) -> Any:
    # In autocast's state of a recording, so that compilers need not compile for two.
    with recording.uncached_autocast():
        return runner.compute(level, args, kwargs, **how)


class _Reserved(NamedTuple):
    """Experts that stay where they are as long as this is referenced."""

    places: tuple[Hashable, ...]  # Equal where all are at the same addresses
    leases: list[object]


class LayerCalls:
    """The calls of one decoder layer: which are of one kind, and what is recorded of each."""

    def __init__(self, model: nn.Module, layer: nn.Module, place: int) -> None:
        self.model, self.layer, self.place = model, layer, place
        self.known: dict[Hashable, RecordedCall | None] = {}  # By kind
        self.places: Any = None  # Of the experts, when calls were recorded
        self._lists = [module for module in layer.modules() if isinstance(module, PackedList)]
        self._adapters: dict[str, int] | None = None
        self._configs: dict[str, Any] = {}  # Referenced: no other gets their ids
        # Where weights and buffers stand: another may be put there (load_state_dict(assign=True))
        self._weights: list[tuple[dict[str, Any], str]] = []
        self._tuners: list[Any] = []

    def reserve(self) -> _Reserved | None:
        """Keep the experts where they are; calls that were recorded elsewhere are forgotten."""
        reserved = self.reserve_at(None)
        if reserved is not None and reserved.places != self.places:
            self.places = reserved.places
            self.known.clear()
        return reserved

    def reserve_at(self, places: tuple[Hashable, ...] | None) -> _Reserved | None:
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
        return _Reserved(tuple(found), list(leases.values()))

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
            elif isinstance(leaf, _CONSTANTS):
                shapes.append((type(leaf), leaf))
            else:
                raise ObstacleError(f"it is called with a {type(leaf).__name__}")
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        kind = structure, tuple(shapes), autocast, _gathers_logits(), self._state()
        return leaves, structure, kind

    def _state(self) -> Hashable:
        """Return addresses of the layer's weights, which are trained, and the active adapters."""
        configs = dict(getattr(self.model, "peft_config", {}))
        adapters = {name: id(config) for name, config in configs.items()}
        if adapters != self._adapters:  # Of a name that was deleted and is used again too
            self._adapters, self._configs = adapters, configs
            self._weights = [
                (tensors, name)
                for module in self.layer.modules()
                for tensors in (module._parameters, module._buffers)
                for name, tensor in tensors.items()
                if tensor is not None
            ]
            self._tuners = [m for m in self.layer.modules() if hasattr(m, "merged_adapters")]
        found = (tensors.get(name) for tensors, name in self._weights)
        weights = tuple((t.data_ptr(), t.requires_grad) for t in found if t is not None)
        active = tuple(
            (
                bool(tuner.disable_adapters),
                tuple(tuner.merged_adapters),
                tuple((name, tuner.scaling.get(name)) for name in tuner.active_adapters),
            )
            for tuner in self._tuners
        )
        return weights, active


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


def _gathers_logits() -> bool:
    """Return whether router logits are gathered now; other outputs cannot be recorded."""
    gathered = output_capturing._active_collector.get() or {}
    if others := sorted(set(gathered) - {_LOGITS}):
        raise ObstacleError(
            f"outputs of layers are gathered ({', '.join(others)}), of which router logits alone "
            "can be recorded"
        )
    return bool(gathered)


@contextmanager
def _gathering(wanted: bool) -> Iterator[list[Tensor]]:
    """Gather router logits of the block in the list, if they are wanted, and nowhere else."""
    found: list[Tensor] = []
    token = output_capturing._active_collector.set({_LOGITS: found} if wanted else None)
    try:
        yield found
    finally:
        output_capturing._active_collector.reset(token)
