"""CUDA graphs of decoder layers, for training where the GPU waits for the host.

A step of few tokens launches some hundred small kernels a layer, more slowly than the GPU runs
them. Here, each decoder layer is recorded for each length of flat rows (flat_rows.py), and replayed
with two calls of the driver:

    forward    hidden states, rotary embeddings, segments -> the layer's output, router logits
    backward   the same, and the output's gradient -> gradients of the hidden states and of the
               layer's trained weights; computes again what the layer does not keep

All graphs share a memory pool, in which lies what layers keep (`planning/levels.py`). In a pass,
which is a forward of the model and its backward, all layers are recorded or all are replayed:
forwards in their order, then backwards. So memory that a layer's backward gives back is used again,
as in a step without graphs, and nothing that is kept is overwritten. The first layer decides. A
pass that begins before the backward of the last one runs without graphs. So does a layer that
cannot be replayed as it was recorded, and the next pass records all anew.

A graph reads weights where they were when it was recorded: on the device, in a layer's slot
(offload.py), which a lease keeps filled meanwhile, or where FSDP2 gathers them (gathered.py).
"""

import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.utils import output_capturing

from ..errors import first_line
from ..kernels import workspace
from ..packing.decoders import PackedList
from ..planning import levels
from ..world import world
from . import segments
from .layers import LayerRunner, decoder_layers, runner_of

_log = logging.getLogger(__name__)

_MOST = 8  # Recorded calls of a layer: the one not run for longest is given up for a ninth
_LOGITS = "router_logits"
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
_RECORDS, _REPLAYS, _RUNS = "records", "replays", "runs without graphs"  # Layers of a pass
# Origins of hooks that a graph may skip: the recording contains their effect.
_KNOWN_HOOKS = ("moe_qlora.", "bitsandbytes.", "torch.nn.utils.parametrize", "transformers.utils.")


class ObstacleError(Exception):
    """A call cannot be recorded, for this reason."""


class LayerGraphs:
    """A model's decoder layers as CUDA graphs, and what these share.

    The first pass runs without graphs, for what compilers and libraries do once. So do calls that
    cannot be recorded, and a warning gives the reason once. Adapters may be switched, disabled,
    added and saved at any time. Gradients are those of the same kernels.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        self._start()
        self.waits: set[Any] | None = None  # Referenced by calls of a pass until their backward
        self._waits: Callable[[], Any] = lambda: None
        self._pass: str | None = None  # None: the first layer will decide
        self._last = -1
        self._warned: set[str] = set()
        self._gathers: list[Any] = []  # `FixedGather` of layers, undone at the end
        self.model = model
        layers = decoder_layers(model).values()
        self._runners = [runner_of(each) or LayerRunner(each, compiles=compiled) for each in layers]
        for place, runner in enumerate(self._runners):
            runner.graphs, runner.calls = self, LayerCalls(runner.layer, place)

    def _start(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._buffers: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()
        self._outdated = False  # Whether a layer could not be replayed as it was recorded
        self._ran = False

    @property
    def _calls(self) -> "list[LayerCalls]":
        return [runner.calls for runner in self._runners if runner.calls is not None]

    @property
    def recorded(self) -> int:
        """Number of recorded calls, of two graphs each."""
        return sum(len(each.known) for each in self._calls)

    def remove(self) -> None:
        """Let the layers run without graphs, and free these."""
        self.forget()
        for gather in self._gathers:
            gather.undo()
        for runner in self._runners:
            runner.graphs = runner.calls = None
            runner.end()
        self._runners = []

    def forget(self) -> None:
        """Give back what was recorded; the next pass runs without graphs."""
        for each in self._calls:
            each.known.clear()
        self._start()

    def buffer(self, role: Hashable, like: Tensor) -> Tensor:
        """Return the contiguous tensor that all graphs share for this role, shape and dtype."""
        key = role, like.shape, like.dtype, like.device
        if (found := self._buffers.get(key)) is None:
            found = torch.empty_like(like, memory_format=torch.contiguous_format)
            self._buffers[key] = found
        return found

    def run(self, runner: LayerRunner, level: str, args: Any, kwargs: Any) -> Any:
        """Run a layer in training: replay its call, record it, or compute it."""
        row = segments.running.get()
        if row is not None and not runner.measured:
            self._enter(runner, row)
            try:
                if row.recorded and (found := self._found(runner, level, args, kwargs)) is not None:
                    out, *logits = found
                    if logits:  # The model's hooks, which a replay does not call, would gather them
                        output_capturing._active_collector.get()[_LOGITS].extend(logits)
                    return out
            except ObstacleError as met:
                self.warn(str(met))
        if self.recorded and not (runner.fits_beside or runner.measured):
            level = levels.RECOMPUTE
        return _compute(runner, level, args, kwargs, preserve_rng_state=True)

    def _enter(self, runner: LayerRunner, row: segments.Segments) -> None:
        """Note that a layer runs; where a pass begins, whether its graphs may run."""
        if runner.calls.place <= self._last:
            self.waits, self._pass = None, _RUNS
            if self._waits() is None:
                self.waits, self._pass = set(), None
                self._waits = weakref.ref(self.waits)
                # The memory of graphs is needed where it does not hold a row beside them.
                if self._outdated or (row.alone and not runner.fits_beside and self.recorded):
                    self.forget()
                    self._ran = True
                    gc.collect()
                    torch.cuda.empty_cache()
        self._last = runner.calls.place

    def _found(self, runner: LayerRunner, level: str, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a replay, of a call that may be recorded before; else None."""
        calls: LayerCalls = runner.calls
        if calls.gather is None:
            calls.gather = world().fix_gather(runner.layer, self.buffer)
            self._gathers += [] if calls.gather is None else [calls.gather]
        if (reserved := calls.reserve()) is None:
            return None
        if calls.places != reserved[0]:
            calls.places = reserved[0]
            calls.known.clear()
        leaves, role, kind = calls.describe(args, kwargs)
        call = calls.known.pop(kind, None)
        fits = call is not None and call.level == level and call.is_whole
        if self._pass is None:
            self._pass = _REPLAYS if fits else _RECORDS if self._ran else _RUNS
            self._ran = True
        if self._pass == _RECORDS:
            try:
                call, fits = RecordedCall(self, runner, level, args, kwargs, leaves, role), True
            except ObstacleError:  # This layer runs without graphs from now on
                runner.graphs = runner.calls = None
                raise
            except Exception as error:  # noqa: BLE001 - capture may fail with anything
                raise ObstacleError(self.give_up(leaves[0].device, error)) from None
            if len(calls.known) == _MOST:
                del calls.known[next(iter(calls.known))]
        if call is not None:
            calls.known[kind] = call  # The last of all
            if fits and self._pass != _RUNS:
                return call.run(leaves)
        self._outdated |= self._pass == _REPLAYS
        return None

    def give_up(self, device: torch.device, error: Exception) -> str:
        """Let all layers run eagerly after an error in recording; return the reason in words."""
        _log.debug("recording a decoder layer failed", exc_info=error)
        failed: BaseException | None = error
        while failed is not None:  # Frames hold tensors of a recording that is no more
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__context__
        generator = torch.cuda.default_generators[device.index]
        # It still belongs to the graph, and refuses to draw numbers.
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):  # If the recording failed earlier
            torch._C._cuda_endAllocateToPool(device.index, self.pool)
        for runner in self._runners:
            runner.graphs = runner.calls = None
        return f"recording it failed ({type(error).__name__}: {first_line(error)})"

    def warn(self, reason: str) -> None:
        """Say once why a layer runs without graphs."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("prepare_training: a decoder layer runs without CUDA graphs: %s.", reason)


def _compute(runner: LayerRunner, level: str, args: Any, kwargs: Any, **how: Any) -> Any:
    # In autocast's state of a recording, so that compilers need not compile for two.
    with uncached_autocast():
        return runner.compute(level, args, kwargs, **how)


class LayerCalls:
    """The calls of one decoder layer: which are of one kind, and what is recorded of each."""

    def __init__(self, layer: nn.Module, place: int) -> None:
        self.layer, self.place = layer, place
        self.known: dict[Hashable, RecordedCall] = {}  # By kind; the one run last is the last
        self.places: Any = None  # Of the weights, when these were recorded
        self.gather: Any = None  # `FixedGather` of a layer that FSDP2 shards
        self._lists = [module for module in layer.modules() if isinstance(module, PackedList)]
        self._tree: list[tuple[Any, list[Any], bool]] = []  # Children; whether it has LoRA

    def _modules(self) -> list[tuple[Any, list[Any], bool]]:
        """Return the layer's modules, listed anew if one came or went: that takes 0.2 ms."""
        if not self._tree or any([*m._modules.values()] != below for m, below, _ in self._tree):
            self._tree = [
                (module, [*module._modules.values()], isinstance(module, BaseTunerLayer))
                for module in self.layer.modules()
            ]
        return self._tree

    def reserve(self, places: tuple[Hashable, ...] | None = None) -> Any:
        """Return where the weights are, equal for equal addresses, and leases that keep them there.

        None where they are not at `places`, if given, or where others hold their slot just now.
        """
        found: list[Hashable] = [each.moves for each in self._lists]
        found += [] if self.gather is None else [self.gather.address]
        leases: dict[int, object] = {}
        for each in self._lists:
            host = each.host
            if host is not None and id(host.layer) not in leases:
                place, leases[id(host.layer)] = host.reserve(each)
                if place is None:
                    return None
                found.append(place)
        return (tuple(found), leases) if places in (None, tuple(found)) else None

    def describe(self, args: Any, kwargs: Any) -> tuple[list[Any], Hashable, Hashable]:
        """Return a call's arguments, their names, and its kind."""
        # That is all that a graph depends on, but the layer's level and the places of its experts.
        leaves, role = tree_leaves((args, kwargs)), (len(args), *kwargs)
        if not leaves or not isinstance(leaves[0], Tensor):
            raise ObstacleError("it is not called with its hidden states first")
        kind: list[Hashable] = [role]
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if leaf.requires_grad and position:
                    raise ObstacleError("it takes gradients to more than its hidden states")
                # Numbers on the host are read when a call is recorded.
                values = tuple(leaf.tolist()) if leaf.is_cpu and leaf.dim() == 1 else None
                kind.append((leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, values))
            elif isinstance(leaf, _CONSTANTS):
                kind.append((type(leaf), leaf))
            else:
                raise ObstacleError(f"it is called with a {type(leaf).__name__}")
        for module, _, has_lora in self._modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                # A trained one may be replaced by another at the same address.
                if tensor is not None:
                    kind += [tensor.data_ptr(), tensor.requires_grad and id(tensor)]
            if has_lora:
                scaling = getattr(module, "scaling", {})
                kind += [bool(module.disable_adapters), *module.merged_adapters]
                kind += [(name, scaling.get(name)) for name in module.active_adapters]
        gathered = output_capturing._active_collector.get() or {}
        if others := sorted(set(gathered) - {_LOGITS}):
            said = f"outputs of layers are gathered ({', '.join(others)})"
            raise ObstacleError(f"{said}, of which router logits alone can be recorded")
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return leaves, role, (autocast, bool(gathered), *kind)


@contextmanager
def _gathering(wanted: bool) -> Iterator[list[Tensor]]:
    """Gather router logits of the block in the list, if they are wanted, and nowhere else."""
    found: list[Tensor] = []
    token = output_capturing._active_collector.set({_LOGITS: found} if wanted else None)
    try:
        yield found
    finally:
        output_capturing._active_collector.reset(token)


class RecordedCall:
    """One kind of call of a layer, as two graphs.

    The forward is recorded when this is made, the backward in the same pass: what the layer keeps
    is alive in the graphs' memory pool meanwhile, as it is in every later step, so that layers that
    are recorded in between use other memory, and layers whose backward is over give theirs back.
    Outputs and gradients are copied from there, since other layers write to it. Calls of one `role`
    share the buffers of their arguments.
    """

    def __init__(
        self, graphs: LayerGraphs, runner: LayerRunner, level: str, args: Any, kwargs: Any,
        leaves: Sequence[Any], role: Hashable,
    ) -> None:  # fmt: skip
        check_recordable(graphs.model, runner)
        self.graphs, self.runner, self.layer, self.level = graphs, runner, runner.layer, level
        self.calls: LayerCalls = runner.calls
        self.places = self.calls.places
        self.keeps = level != levels.RECOMPUTE  # More than its hidden states
        self.structure = tree_flatten((args, kwargs))[1]
        self.gathers = bool(output_capturing._active_collector.get())
        self.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        named = {name: p for name, p in self.layer.named_parameters() if p.requires_grad}
        self.trained = [*named.values()]
        self.weights = {name: nn.Parameter(p.detach()) for name, p in named.items()}
        x = leaves[0]
        self.generator = torch.cuda.default_generators[x.get_device()]
        # Hidden states that are kept lie where no other layer writes.
        roles: list[Hashable] = [("kept", object()) if self.keeps else "hidden states"]
        roles += [("argument", i, role) for i in range(1, len(leaves))]
        self.arguments = [
            graphs.buffer(each, leaf) if isinstance(leaf, Tensor) else leaf
            for each, leaf in zip(roles, leaves, strict=True)
        ]
        self._fill(leaves)
        self.x = self.arguments[0].detach().requires_grad_(x.requires_grad)
        self.outs: list[Tensor] = []  # The layer's output, and router logits
        self.grads: list[Tensor] = []  # Of each
        self.grad_x: Tensor | None = None
        self.weight_grads: list[Tensor | None] = []
        self.graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.has_backward = False
        # Without collecting for a checkpoint's recomputation before the recording
        with torch.cuda.device(x.device), self.exchanged(), _gathering(False):
            # Both run once before, for one-time work of compilers and libraries.
            offset = self.generator.get_offset()
            with uncached_autocast():  # As in the recording: compiled code checks it
                self._gradients(self._forward())
            self.outs, self.weight_grads, self.grad_x = [], [], None
            self.generator.set_offset(offset)
            with workspace.recorded(x.device):
                with capture(self.graph, graphs.pool):
                    self.edges = self._forward()  # Until the backward is recorded
                self.outs = [_unowned(out) for out in self.outs]
                self.workspace = [*workspace.buffers(x.device)]  # Graphs write to it

    @property
    def is_whole(self) -> bool:
        """Whether its backward is recorded, if it has one."""
        # In another pass, a backward would write where other layers keep tensors.
        return self.has_backward or not (self.x.requires_grad or self.trained)

    def exchanged(self) -> Any:
        """Put tensors at the same addresses in the place of the trained weights within a block."""
        # If an earlier step's loss is alive, so are the nodes that accumulate gradients on the
        # default stream; autograd would wait for that stream during the recording.
        return _reparametrize_module(self.layer, {**self.weights}, tie_weights=True)

    def _fill(self, leaves: Sequence[Any]) -> None:
        for buffer, leaf in zip(self.arguments, leaves, strict=True):
            if isinstance(leaf, Tensor) and buffer is not leaf:
                # By an alias: autograd would refuse what a recorded backward has of it.
                buffer.data.copy_(leaf)

    def _computed(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the layer's hidden states, and router logits that are gathered."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        with torch.enable_grad(), _gathering(self.gathers) as logits:
            out = _compute(self.runner, self.level, args, kwargs, preserve_rng_state=False)
        return out, *logits

    def _forward(self) -> list[GradientEdge | None]:
        computed = self._computed([self.x, *self.arguments[1:]])
        if not isinstance(computed[0], Tensor) or computed[0].shape != self.x.shape:
            raise ObstacleError("it returns more than hidden states")
        self.outs = [each.detach() for each in computed]
        self.grads = [self.graphs.buffer(("grad", i), out) for i, out in enumerate(self.outs)]
        return [get_gradient_edge(each) if each.requires_grad else None for each in computed]

    def _gradients(self, edges: Sequence[GradientEdge | None]) -> None:
        with torch.autocast("cuda", enabled=False):
            weights = [*self.weights.values()]
            self.grad_x, self.weight_grads = _grad(edges, self.x, weights, self.grads)

    def _record_backward(self) -> None:
        edges, self.edges = self.edges, []
        device = self.x.device
        try:
            with torch.cuda.device(device), self.exchanged(), workspace.recorded(device):
                with capture(self.backward_graph, self.graphs.pool):
                    self._gradients(edges)
                self.grad_x = None if self.grad_x is None else _unowned(self.grad_x)
                self.weight_grads = [None if g is None else _unowned(g) for g in self.weight_grads]
                self.workspace += workspace.buffers(device)
            self.has_backward = True
        except Exception as error:  # noqa: BLE001 - capture may fail with anything
            self.graphs.warn(self.graphs.give_up(device, error))

    def run(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Replay the forward; return the layer's output, and router logits if it gathers them."""
        outs: Sequence[Tensor] = _Replay.apply(self, leaves[1:], leaves[0], *self.trained)
        with torch.no_grad():
            self._fill(leaves)
            self.graph.replay()
            for out, buffer in zip(outs, self.outs, strict=True):
                out.detach().copy_(buffer)
        workspace.forget(self.x.device)
        return outs

    def backward(
        self, leaves: Sequence[Any], grads: Sequence[Tensor], offset: int
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Replay the backward; return gradients of the hidden states and of the trained weights.

        `offset` is the forward's offset of random numbers: dropout draws them again.
        """
        now = self.generator.get_offset()
        if self.keeps:  # Its hidden states are where they were
            leaves = [self.arguments[0], *leaves[1:]]
        self._fill(leaves)
        self.generator.set_offset(offset)
        try:
            reserved = self.calls.reserve(self.places)
            if reserved is not None and not self.has_backward and self.runner.calls is self.calls:
                self._record_backward()
            if reserved is None or not self.has_backward:
                return self._again(leaves, grads)
            for buffer, grad in zip(self.grads, grads, strict=True):
                buffer.copy_(grad)
            self.backward_graph.replay()
            del reserved
        finally:
            self.generator.set_offset(now)
        workspace.forget(self.x.device)
        pairs = zip(self.trained, self.weight_grads, strict=True)
        copies = [None if grad is None else torch.empty_like(weight) for weight, grad in pairs]
        if found := [grad for grad in self.weight_grads if grad is not None]:
            torch._foreach_copy_([copy for copy in copies if copy is not None], found)
        return None if self.grad_x is None else self.grad_x.clone(), copies

    def _again(
        self, leaves: Sequence[Any], grads: Sequence[Tensor]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Compute without graphs: none was recorded, or experts are not where they were."""
        self.edges = []
        x = leaves[0].detach().requires_grad_(self.x.requires_grad)
        enabled, dtype = self.autocast
        with torch.autocast("cuda", dtype, enabled=enabled):
            computed = self._computed([x, *leaves[1:]])
        outs = [out if out.requires_grad else None for out in computed]
        return _grad(outs, x, self.trained, grads)


class _Replay(torch.autograd.Function):
    """Saves the inputs for backward, and allocates the outputs."""

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, others: Sequence[Any], x: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.others, ctx.offset = call, others, call.generator.get_offset()
        ctx.waits = call.graphs.waits
        ctx.save_for_backward(*(() if call.keeps else (x,)))
        return tuple(torch.empty_like(out) for out in call.outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.call is None:
            raise RuntimeError(
                "a decoder layer that is recorded was differentiated twice: call backward "
                "once for each forward, without retain_graph=True."
            )
        x = None if ctx.call.keeps else ctx.saved_tensors[0]
        grad_x, of_weights = ctx.call.backward([x, *ctx.others], grads, ctx.offset)
        # Autograd nodes may outlive their backward (some of Liger's do); a model must not.
        ctx.call = ctx.others = ctx.waits = None
        return None, None, grad_x, *of_weights


def _grad(
    outs: Sequence[Any], x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return gradients of the input and of weights, from those of the outputs that are not None."""
    inputs = [*([x] if x.requires_grad else []), *weights]
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out is not None]
    found: Sequence[Any] = [None] * len(inputs)
    if pairs and inputs:  # Not of a layer that trains nothing, behind none that does
        differentiated, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(differentiated, inputs, given, allow_unused=True)
    return (found[0], [*found[1:]]) if x.requires_grad else (None, [*found])


def _unowned(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address that does not keep its memory from being used again."""
    # What a graph returns is there until another one runs, which is when it has been copied. It is
    # made as torch's graphs of compiled code make theirs (torch/_inductor/cudagraph_trees.py).
    if not tensor.is_cuda:
        return tensor.detach()
    end = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
    place = tensor.data_ptr(), tensor.device, (end + 1) * tensor.itemsize
    storage = torch._C._construct_storage_from_data_pointer(*place)
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, 0, tensor.shape, tensor.stride())


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record the kernels launched in the block."""
    stream = torch.cuda.current_stream()
    try:
        mode = "thread_local"  # Another thread may read experts ahead, and tell CUDA of it
        with uncached_autocast(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            yield
    except BaseException:
        # torch stays on the stream of a recording that it cannot end.
        torch.cuda.set_stream(stream)
        raise


def uncached_autocast() -> Any:
    """Return autocast as it is, without its cache: a cast weight would be in a graph's memory."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False)


def check_recordable(model: nn.Module, runner: LayerRunner) -> None:
    """Raise if weights move, or a module within a layer has a hook of other code."""
    gather = runner.calls.gather
    if world().uses_fsdp(model) and (gather is None or not gather.is_fixed):
        raise ObstacleError("FSDP does not gather it by itself, one layer at a time")
    for name, module in runner.layer.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks if name else ():
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if not f"{home}.".startswith(_KNOWN_HOOKS):
                raise ObstacleError(f"{name} has a hook of {home}, which a graph would skip")
