"""CUDA graphs of single calls of a decoder layer, replayed under autograd.

graphs.py decides which calls are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..kernels import workspace
from ..planning import levels
from .lent import Lent, is_at

_KNOWN_HOOKS = ("moe_qlora.", "bitsandbytes.", "torch.nn.utils.parametrize", "transformers.utils.")
"""Origins of hooks that a graph may skip: the recording contains their effect."""

_IN_USE = "hidden states or gradients of an earlier step are still in use; clone what you keep"


class ObstacleError(Exception):
    """A call cannot be recorded, for this reason."""


Compute = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Returns a layer's hidden states and router logits for its arguments, without random state."""


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


class RecordedCall:
    """One kind of call of a layer, as two graphs.

    The forward is recorded when this is made, the backward when it first runs: what the layer keeps
    is alive in the graphs' memory pool meanwhile, as it is in every later step, so that layers that
    are recorded in between use other memory, and layers whose backward is over give theirs back.
    """

    def __init__(
        self,
        layer: nn.Module,
        compute: Compute,
        shared: Any,
        leaves: Sequence[Any],
        *,
        reserve: Callable[[], object | None],
        role: Hashable = None,
        level: str = levels.RECOMPUTE,
    ) -> None:
        """Record the forward.

        Args:
            layer: The decoder layer.
            compute: Computes it, and router logits that are gathered, from its arguments.
            shared: The `LayerGraphs`.
            leaves: Its arguments, hidden states first.
            reserve: Keeps the layer's experts where they are now, for backward, as long as what it
                returns is referenced; None where they are elsewhere by then.
            role: Calls of one role share the buffers of all arguments, filled once in a step.
            level: What it keeps for its backward (planning/levels.py).

        Raises:
            ObstacleError: A module has hooks that a graph would skip, or other outputs are made.
        """
        check_hooks(layer)
        self.layer, self.compute, self.shared, self.level = layer, compute, shared, level
        self.keeps = keeps = level != levels.RECOMPUTE  # Whether more than its inputs
        self.last_pass = 0  # The model's forward pass in which it was run last
        self.pool = shared.pool  # Which later recordings may not use
        self.reserve = reserve
        self.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        self.trained = [p for p in layer.parameters() if p.requires_grad]
        self.used: list[nn.Parameter] = []  # those with a gradient
        x = leaves[0]
        self.generator = torch.cuda.default_generators[x.get_device()]
        self.weights = [nn.Parameter(weight.detach()) for weight in self.trained]
        self.input: Lent | None = None  # Its hidden states, where another layer has lent them
        self.arguments = self._places(leaves, role)
        shared.fill(self.arguments, leaves)
        self.x = self.arguments[0].detach().requires_grad_(x.requires_grad)
        self.outs: list[Tensor] = []  # The layer's output, and router logits
        self.out: Lent | None = None  # The first of them
        self.grads: list[Tensor] = []  # Of each
        self.grad_x: Tensor | None = None
        self.weight_grads: list[Tensor] = []  # Of those used
        # Of those used, whose gradients are lent: the weights, and the gradients
        self.lent: tuple[list[nn.Parameter], list[Lent]] = ([], [])
        self.graph = torch.cuda.CUDAGraph()
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.workspace: list[Tensor] = []  # graphs write to it
        # To the outputs, until the backward is recorded
        self.edges: list[GradientEdge | None] = []
        with torch.cuda.device(x.device), _exchanged(layer, self.trained, self.weights):
            self._warm_up()
            with workspace.recorded(x.device):
                with capture(self.graph, self.pool):
                    self.edges = self._forward()
                if keeps and self.outs[0].is_contiguous():  # It stays where it is
                    self.out = Lent(self.outs[0])
                self.outs = [_unowned(out) for out in self.outs]
                self.workspace += workspace.buffers(x.device)

    def _places(self, leaves: Sequence[Any], role: Hashable) -> list[Any]:
        """Return the arguments, with tensors that the graphs read in the place of a call's."""
        places = [
            self.shared.buffer(("argument", i, role if i else None), leaf.shape, leaf)
            if isinstance(leaf, Tensor)
            else leaf
            for i, leaf in enumerate(leaves)
        ]
        if self.keeps:  # Its hidden states are kept where no other layer writes
            x, before = leaves[0], self.shared.lender.out
            if before is not None and before.is_lent_as(x):
                self.input, places[0] = before, before.tensor
            else:
                places[0] = torch.empty_like(x, memory_format=torch.contiguous_format)
        return places

    def _warm_up(self) -> None:
        """Run both before recording, for one-time work of compilers and libraries."""
        offset = self.generator.get_offset()
        with uncached_autocast():  # As in the recording: compiled code checks it
            self._gradients(self._forward())
        self.outs, self.weight_grads, self.grad_x = [], [], None
        self.generator.set_offset(offset)

    def _forward(self) -> list[GradientEdge | None]:
        with torch.enable_grad():
            computed = self.compute([self.x, *self.arguments[1:]])
        if not isinstance(computed[0], Tensor) or computed[0].shape != self.x.shape:
            raise ObstacleError("it returns more than hidden states")
        self.outs = [each.detach() for each in computed]
        self.grads = [
            self.shared.buffer(("grad", place), out.shape, out)
            for place, out in enumerate(self.outs)
        ]
        return [get_gradient_edge(each) if each.requires_grad else None for each in computed]

    def _gradients(self, edges: Sequence[GradientEdge | None]) -> None:
        x = self.x
        inputs = [*([x] if x.requires_grad else []), *self.weights]
        with torch.autocast("cuda", enabled=False):
            grads = _grad(edges, inputs, self.grads)
        of_weights = grads[len(inputs) - len(self.weights) :]
        self.used = [w for w, g in zip(self.trained, of_weights, strict=True) if g is not None]
        self.weight_grads = [grad for grad in of_weights if grad is not None]
        self.grad_x = grads[0] if x.requires_grad else None

    def _record_backward(self, grad: Tensor) -> None:
        lender, edges, self.edges = self.shared.lender, self.edges, []
        if lender.grad is not None and lender.grad.is_lent_as(grad):
            self.grads[0] = lender.grad.tensor
        device, graph = self.x.device, torch.cuda.CUDAGraph()
        exchanged = _exchanged(self.layer, self.trained, self.weights)
        with torch.cuda.device(device), exchanged, workspace.recorded(device):
            with capture(graph, self.pool):
                self._gradients(edges)
            # The layer before reads it, and must not be recorded to write to the same memory.
            lender.recorded = self.grad_x
            self.grad_x = None if self.grad_x is None else _unowned(self.grad_x)
            self.workspace += workspace.buffers(device)
        # A gradient may be that of the output, of the hidden states, or of several weights.
        others = [*self.grads, *([] if self.grad_x is None else [self.grad_x])]
        places = {other.data_ptr() for other in others}
        for weight, grad in zip(self.used, self.weight_grads, strict=True):
            suits = self.keeps and grad.is_contiguous() and grad.dtype == weight.dtype
            if suits and grad.data_ptr() not in places:
                self.lent[0].append(weight)
                self.lent[1].append(Lent(grad))
            places.add(grad.data_ptr())
        self.weight_grads = [_unowned(grad) for grad in self.weight_grads]
        self.backward_graph = graph

    def run(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Return the layer's output, and its router logits if they are gathered.

        Raises:
            ObstacleError: Somebody still uses what its graphs would overwrite.
        """
        if not self._is_free(leaves[0]):
            raise ObstacleError(_IN_USE)
        outs: Sequence[Tensor] = _Replay.apply(self, leaves[1:], leaves[0], *self.trained)
        # Not reached in the recomputation of an outer checkpoint, which stops at the saved tensors.
        with torch.no_grad():
            self.shared.fill(self.arguments, leaves)
            self.graph.replay()
            for out, buffer in zip(outs, self.outs, strict=True):
                if not is_at(out, buffer):
                    out.detach().copy_(buffer)
        workspace.forget(self.x.device)
        self.shared.lender.out = self.out
        return outs

    def _is_free(self, x: Tensor) -> bool:
        return (
            self.shared.lender.settle()
            and (self.out is None or self.out.is_free)
            and (self.input is None or self.input.is_free or self.input.is_lent_as(x))
        )

    def room(self) -> list[Tensor]:
        """Return tensors for the output and router logits: lent, or new."""
        empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
        first, *others = self.outs
        return [empty(first) if self.out is None else self.out.lend(), *map(empty, others)]

    def backward(
        self, leaves: Sequence[Any], grads: Sequence[Tensor], offset: int, *, lends: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradients of the hidden states and of the trained weights.

        `leaves` are the call's arguments, whose hidden states are None where they are kept.
        `offset` is the forward's offset of random numbers: dropout draws them again. With `lends`,
        the gradient of the hidden states goes to the layer that has lent them.
        """
        if self.keeps:  # Its hidden states are where they were
            leaves = [self.arguments[0], *leaves[1:]]
        self.shared.fill(self.arguments, leaves)
        lender, now = self.shared.lender, self.generator.get_offset()
        self.generator.set_offset(offset)
        try:
            reserved = self.reserve()
            used = lender.has_lent_other_than(grads[0])
            used = used or not all(lent.is_free for lent in self.lent[1])
            if reserved is not None and not used and self.backward_graph is None:
                self.shared.record_backward(self, partial(self._record_backward, grads[0]))
            if reserved is None or used or self.backward_graph is None:
                return self._again(leaves, grads)
            for buffer, grad in zip(self.grads, grads, strict=True):
                if not is_at(grad, buffer):
                    buffer.copy_(grad)
            self.backward_graph.replay()
            del reserved
        finally:
            self.generator.set_offset(now)
        workspace.forget(self.x.device)
        grad_x = self.grad_x
        if grad_x is not None:
            lends = lends and grad_x.is_contiguous()
            grad_x = lender.lend_grad(Lent(grad_x)) if lends else grad_x.clone()
        of_weights = dict(zip(self.lent[0], lender.lend_grads_of(*self.lent), strict=True))
        pairs = zip(self.used, self.weight_grads, strict=True)
        others = {weight: grad for weight, grad in pairs if weight not in of_weights}
        if others:
            copies = [torch.empty_like(weight) for weight in others]
            torch._foreach_copy_(copies, list(others.values()))
            of_weights |= zip(others, copies, strict=True)
        return grad_x, [of_weights.get(weight) for weight in self.trained]

    def _again(
        self, leaves: Sequence[Any], grads: Sequence[Tensor]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Compute without graphs: none was recorded, or experts are not where they were."""
        self.edges = []
        x = leaves[0].detach().requires_grad_(self.x.requires_grad)
        enabled, dtype = self.autocast
        with torch.enable_grad(), torch.autocast("cuda", dtype, enabled=enabled):
            computed = self.compute([x, *leaves[1:]])
        inputs = [*([x] if x.requires_grad else []), *self.trained]
        outs = [out if out.requires_grad else None for out in computed]
        found = _grad(outs, inputs, grads)
        count = len(inputs) - len(self.trained)
        return (found[0] if count else None), found[count:]


class _Replay(torch.autograd.Function):
    """Saves the inputs for backward, and allocates the outputs."""

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, others: Sequence[Any], x: Tensor, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.others, ctx.offset = call, others, call.generator.get_offset()
        ctx.pending = call.shared.passes.pending(call)
        ctx.save_for_backward(*(() if call.keeps else (x,)))
        ctx.lends = call.input is not None and call.input.is_lent_as(x)
        return tuple(call.room())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.call is None:
            raise RuntimeError(
                "a decoder layer that is recorded was differentiated twice: call backward "
                "once for each forward, without retain_graph=True."
            )
        x = None if ctx.call.keeps else ctx.saved_tensors[0]
        leaves = [x, *ctx.others]
        grad_x, of_weights = ctx.call.backward(leaves, grads, ctx.offset, lends=ctx.lends)
        # Autograd nodes may outlive their backward (some of Liger's do); a model must not.
        ctx.call = ctx.others = ctx.pending = None
        return None, None, grad_x, *of_weights


def _grad(outs: Sequence[Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Any]:
    """Return gradients of the inputs, from those of the outputs that are not None."""
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out is not None]
    if not pairs or not inputs:  # A layer that trains nothing, behind none that does
        return [None] * len(inputs)
    differentiated, given = zip(*pairs, strict=True)
    return torch.autograd.grad(differentiated, inputs, given, allow_unused=True)


class _Address:
    """Bytes of a device, by the interface that tensors are made of."""

    def __init__(self, tensor: Tensor) -> None:
        end = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": ((end + 1) * tensor.itemsize,),
            "typestr": "|u1",
            "version": 3,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address that does not keep its memory from being used again.

    What a graph returns is there until another one runs, which is when it has been copied.
    """
    if not tensor.is_cuda:
        return tensor.detach()
    flat = torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


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
