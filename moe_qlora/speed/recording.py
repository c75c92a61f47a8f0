"""CUDA graphs of single calls of a decoder layer, replayed under autograd or by `generate`.

graphs.py decides which calls are recorded.

    RecordedCall     training: a checkpointed forward in one graph; its backward, which computes the
                     layer again, in another
    RecordedDecode   one new token of `generate` on a static cache, in one graph. A token takes some
                     hundred kernels a layer, 2 us each on the GPU and 5 or more on the host;
                     torch.compile, transformers' way, compiles for a minute first and checks some
                     thousand conditions at each token

A graph reads and writes a cache at fixed addresses, and `generate` makes a cache for each call: its
content is copied to the recorded addresses, and the cache is then given those tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..kernels import workspace
from ..kernels.limits import cdiv

_ALIGNMENT = 16  # bytes, of the parts of a buffer

_KNOWN_HOOKS = ("moe_qlora.", "bitsandbytes.", "torch.nn.utils.parametrize", "transformers.utils.")
"""Origins of hooks that a graph may skip: the recording contains their effect."""
_STATES = ("keys", "values", "cumulative_length")


class ObstacleError(Exception):
    """A call cannot be recorded, for this reason."""


class Buffers(Protocol):
    """The tensors at fixed addresses that all graphs of a model share."""

    pool: Any  # The graphs' memory pool

    def buffer(self, role: Any, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the contiguous tensor for this role and shape, with the dtype of `like`."""

    def fill(self, buffers: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Copy a call's tensors to their buffers."""


Compute = Callable[[Sequence[Any]], Any]
"""Computes a layer from its arguments, under a checkpoint without random state."""


def end_recording(device: torch.device, pool: Any) -> None:
    """Clean up torch's state after a failed recording."""
    generator = torch.cuda.default_generators[device.index]
    # It still belongs to the graph, and refuses to draw numbers.
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # if the recording failed earlier
        torch._C._cuda_endAllocateToPool(device.index, pool)


def check_hooks(layer: nn.Module) -> None:
    """Raise if a module within a layer has a hook that a graph would skip."""
    for name, module in layer.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks if name else ():
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if not f"{home}.".startswith(_KNOWN_HOOKS):
                raise ObstacleError(f"{name} has a hook of {home}, which a graph would skip")


class _Graphs(NamedTuple):
    """Two graphs and their buffers."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    arguments: list[Any]  # of the call; tensors are buffers
    out: Tensor
    grad: Tensor
    grad_x: Tensor | None  # None: hidden states without gradient
    weight_grads: Tensor | None  # bytes; None: no trained weight
    workspace: tuple[Tensor, ...]  # graphs write to it


class RecordedCall:
    """One kind of call of a layer, as two graphs."""

    def __init__(
        self, layer: nn.Module, compute: Compute, shared: Buffers, leaves: Sequence[Any]
    ) -> None:
        """Record it; `leaves` are the layer's arguments, its hidden states first.

        Raises:
            ObstacleError: The layer has hooks that a graph would skip, or returns more than hidden
                states.
        """
        check_hooks(layer)
        self.shared = shared
        self.trained = [p for p in layer.parameters() if p.requires_grad]
        self.used: list[nn.Parameter] = []  # those with a gradient
        self.generator = torch.cuda.default_generators[leaves[0].get_device()]
        self.graphs = self._record(layer, compute, leaves)

    def _record(self, layer: nn.Module, compute: Compute, leaves: Sequence[Any]) -> _Graphs:
        shared, x = self.shared, leaves[0]
        arguments = [
            shared.buffer(("argument", position), leaf.shape, leaf)
            if isinstance(leaf, Tensor)
            else leaf
            for position, leaf in enumerate(leaves)
        ]
        shared.fill(arguments, leaves)
        hidden_states = arguments[0].detach().requires_grad_(x.requires_grad)
        weights = [nn.Parameter(weight.detach()) for weight in self.trained]
        out, grad = (shared.buffer(role, x.shape, x) for role in ("out", "grad"))
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

        def forward() -> Tensor:
            computed = compute([hidden_states, *arguments[1:]])
            if not isinstance(computed, Tensor) or computed.shape != x.shape:
                raise ObstacleError("it returns more than hidden states")
            with torch.no_grad():
                out.copy_(computed)
            return computed

        with torch.cuda.device(x.device), _exchanged(layer, self.trained, weights):
            # A run before recording, for one-time work of compilers and libraries.
            offset = self.generator.get_offset()
            self._gradients(forward(), hidden_states, weights, grad)
            self.generator.set_offset(offset)
            with workspace.recorded(x.device):
                with capture(graphs[0], shared.pool):
                    computed = forward()
                with capture(graphs[1], shared.pool):
                    grad_x, weight_grads = self._gradients(computed, hidden_states, weights, grad)
                buffers = workspace.buffers(x.device)
        return _Graphs(*graphs, arguments, out, grad, grad_x, weight_grads, buffers)

    def _gradients(
        self, computed: Tensor, x: Tensor, weights: Sequence[Tensor], grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute gradients of x, and of all trained weights as bytes, into shared buffers."""
        inputs = [*([x] if x.requires_grad else []), *weights]
        with torch.autocast("cuda", enabled=False):
            grads = torch.autograd.grad(computed, inputs, grad, allow_unused=True)
        grad_x = weight_grads = None
        of_weights = grads[len(inputs) - len(weights) :]
        self.used = [w for w, g in zip(self.trained, of_weights, strict=True) if g is not None]
        with torch.no_grad():
            if x.requires_grad:
                grad_x = self.shared.buffer("grad_x", x.shape, x)
                grad_x.copy_(grads[0])
            if self.used:
                size = sum(_room(weight) for weight in self.used)
                like = torch.empty(0, dtype=torch.uint8, device=x.device)
                weight_grads = self.shared.buffer("weight_grads", (size,), like)
                into = _parts(weight_grads, self.used)
                torch._foreach_copy_(into, [g for g in of_weights if g is not None])
        return grad_x, weight_grads

    def run(self, leaves: Sequence[Any]) -> Tensor:
        """Return the layer's output."""
        out: Tensor = _Replay.apply(self, leaves[1:], leaves[0], *self.trained)
        # Not reached in the recomputation of an outer checkpoint, which stops at the saved tensors.
        with torch.no_grad():
            self.shared.fill(self.graphs.arguments, leaves)
            self.graphs.forward.replay()
            out.detach().copy_(self.graphs.out)
        workspace.forget(out.device)
        return out

    def backward(
        self, leaves: Sequence[Any], grad: Tensor, offset: int
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradients of the hidden states and of the trained weights.

        `offset` is the forward's offset of random numbers: dropout draws them again.
        """
        graphs = self.graphs
        self.shared.fill(graphs.arguments, leaves)
        graphs.grad.copy_(grad)
        now = self.generator.get_offset()
        self.generator.set_offset(offset)
        graphs.backward.replay()
        self.generator.set_offset(now)
        workspace.forget(grad.device)
        grad_x = None if graphs.grad_x is None else graphs.grad_x.clone()
        if graphs.weight_grads is None:
            return grad_x, [None] * len(self.trained)
        grads = dict(zip(self.used, _parts(graphs.weight_grads.clone(), self.used), strict=True))
        return grad_x, [grads.get(weight) for weight in self.trained]


class _Replay(torch.autograd.Function):
    """Saves the inputs for backward, and allocates the output."""

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, others: Sequence[Any], x: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.call, ctx.others, ctx.offset = call, others, call.generator.get_offset()
        ctx.save_for_backward(x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.call is None:
            raise RuntimeError(
                "a decoder layer that graph_layers records was differentiated twice: call backward "
                "once for each forward, without retain_graph=True."
            )
        (x,) = ctx.saved_tensors
        grad_x, grads = ctx.call.backward([x, *ctx.others], grad, ctx.offset)
        # Autograd nodes may outlive their backward (some of Liger's do); a model must not.
        ctx.call = ctx.others = None
        return None, None, grad_x, *grads


def _room(tensor: Tensor) -> int:
    """Return the aligned size of a tensor in a buffer, in bytes."""
    return cdiv(tensor.nbytes, _ALIGNMENT) * _ALIGNMENT


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Divide a tensor of bytes into views with the shapes and dtypes of `like`."""
    parts: list[Tensor] = []
    first = 0
    for each in like:
        parts.append(flat[first : first + each.nbytes].view(each.dtype).view(each.shape))
        first += _room(each)
    return parts


@contextmanager
def _exchanged(
    layer: nn.Module, weights: Sequence[nn.Parameter], others: Sequence[Tensor]
) -> Iterator[None]:
    """Replace the layer's parameters by other tensors within the block.

    If an earlier step's loss is alive, so are the nodes that accumulate gradients on the default
    stream; autograd would wait for that stream during the recording.
    """
    by_weight = {id(weight): other for weight, other in zip(weights, others, strict=True)}
    places = [
        (module._parameters, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in by_weight
    ]
    for parameters, name, parameter in places:
        parameters[name] = by_weight[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record the kernels launched in the block."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    # A cast weight in autocast's cache would be in the graph's memory.
    with (
        torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False),
        torch.cuda.graph(graph, pool=pool),
    ):
        yield


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
                capture(self.graph, shared.pool),
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
