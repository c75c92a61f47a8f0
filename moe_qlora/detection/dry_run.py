"""A copy of one block that runs anywhere: small tensors are random numbers, big ones meta tensors.

The model is never run or changed; nothing the size of a weight is allocated.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .trace import BlockTrace, Trace
from .tree import LOOKUP_TABLES, Leaf, Node

# Routers, norms and biases stay below this many elements at every published size (384 x 7168 is
# the largest router).
_SMALL = 1 << 22
_MAX_ATTEMPTS = 24


def _stand_in(
    leaf_shape: tuple[int, ...], dtype: torch.dtype, big: bool, generator: torch.Generator
) -> torch.Tensor:
    if big:
        return torch.empty(leaf_shape, dtype=dtype, device="meta")
    if not dtype.is_floating_point:
        return torch.zeros(leaf_shape, dtype=dtype)
    return torch.randn(leaf_shape, generator=generator).mul_(0.5).to(dtype)


def _run_dtype(dtype: torch.dtype) -> torch.dtype:
    return (
        dtype
        if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        else torch.float32
    )


class Shadow:
    """A runnable copy of `block`.

    Args:
        block: The module to copy, with everything below it.
        stacks: Leaves (of the whole model) that are candidate stacks; always meta in the copy. The
            key of `stacks[i]` in the trace is i.
        everything: All leaves of the model: a block that refers back to its parent must not copy
            weights.
        routers: Leaves that could be the stacks' router: what is computed from them is followed.
        seed: For the random numbers.

    Raises:
        Exception: whatever `copy.deepcopy` raises on a module that cannot be copied.
    """

    def __init__(
        self,
        block: Node,
        stacks: Sequence[Leaf],
        everything: Iterable[Leaf],
        routers: Iterable[Leaf] = (),
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.stacks: dict[int, torch.Tensor] = {}
        keys = {id(leaf): index for index, leaf in enumerate(stacks)}
        memo: dict[int, Any] = {}
        inside = {id(node) for node in block.subtree()}
        originals: list[torch.Tensor] = []
        replaced: dict[int, torch.Tensor] = {}
        for leaf in everything:
            key = keys.get(id(leaf))
            big = key is not None or leaf.numel > _SMALL or id(leaf.node) not in inside
            dtype = (
                _run_dtype(leaf.dtype)
                if leaf.dtype.is_floating_point or leaf.packed
                else leaf.dtype
            )
            value = _stand_in(leaf.shape, dtype, big, self.generator)
            if leaf.kind != "buffer":
                value = nn.Parameter(value, requires_grad=False)
            if key is not None:
                self.stacks[key] = value
            memo[id(leaf.tensor)] = value
            replaced[id(leaf)] = value
            originals.append(leaf.tensor)
        self.dtype = next((_run_dtype(leaf.dtype) for leaf in stacks), torch.float32)
        # Loggers, hooks and the like stay shared; a copy of their targets is never called.
        for node in block.subtree():
            # What decodes packed weights is left behind: the copy's weights are never decoded.
            bank = node.module._modules.get("parametrizations")
            if bank is not None:
                memo[id(bank)] = nn.ModuleDict()
            for hook_name in _HOOKS:
                hooks = node.module.__dict__.get(hook_name)
                if hooks:
                    memo[id(hooks)] = type(hooks)()
        with torch.device("cpu"):
            self.module: nn.Module = copy.deepcopy(block.module, memo)
        self._settle(block, replaced)
        self._routers = [replaced[id(leaf)] for leaf in routers if id(leaf) in replaced]

    def _settle(self, block: Node, replaced: dict[int, torch.Tensor]) -> None:
        """Unpack what is packed: the copy's parametrized and 4-bit modules become plain ones."""
        prefix = len(block.name) + 1 if block.name else 0
        for node in list(block.subtree()):
            if node.module is not block.module:
                module = self.module.get_submodule(node.name[prefix:])
            else:
                module = self.module
            module.training = False
            # accelerate's wrapper of the forward moves real tensors between devices.
            if "_old_forward" in module.__dict__:
                module.__dict__.pop("forward", None)
            config: Any = module.__dict__.get("config")
            if getattr(config, "_experts_implementation", None) is not None:
                config._experts_implementation = "eager"
            if "parametrizations" in module._modules:
                del module._modules["parametrizations"]
                module.__class__ = type(module).__mro__[1]
                for leaf in node.leaves:
                    if leaf.attribute not in module._parameters and leaf.kind == "bare":
                        value: Any = replaced[id(leaf)]
                        module.register_parameter(leaf.attribute, value)
            elif isinstance(module, nn.Linear) and any(leaf.packed for leaf in node.leaves):
                module.__class__ = nn.Linear

    def run(self, *args: Any) -> Trace:
        """Call the copy's forward under the watching mode; a failure ends the trace."""
        watch = BlockTrace(self.stacks, self.generator)
        for argument in args:
            if isinstance(argument, torch.Tensor):
                watch.mark_input(argument)
        for router in self._routers:
            watch.mark_router(router)
        try:
            # What a foreign forward prints is not this program's output. The redirection is the
            # process's: one at a time, or another thread would put back what it found meanwhile.
            with _PRINTS, contextlib.redirect_stdout(io.StringIO()), torch.no_grad(), watch:
                self.module(*args)
            watch.trace.completed = True
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            watch.trace.error = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        return watch.trace


_PRINTS = threading.RLock()

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def token_shape(avoid: Iterable[int]) -> tuple[int, int]:
    """A (batch, sequence) whose numbers, and whose product, are none of `avoid`."""
    taken = set(avoid)
    for batch, length in ((2, 3), (2, 5), (3, 5), (2, 7), (3, 7), (5, 7), (3, 11), (7, 11)):
        if not {batch, length, batch * length} & taken:
            return batch, length
    return 11, 13


def argument_lists(
    module: nn.Module,
    hidden_sizes: Sequence[int],
    tokens: tuple[int, int],
    experts: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Any, ...]]:
    """Plausible calls of a block: hidden states first, then token ids, routing or hidden states."""
    batch, length = tokens
    count = batch * length
    top_k = min(2, experts)
    needed = _required(module)
    for hidden in hidden_sizes:
        nested = torch.randn(batch, length, hidden).to(dtype)
        flat = torch.randn(count, hidden).to(dtype)
        index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(count)])
        weights = torch.rand(count, top_k).to(dtype)
        logits = torch.randn(count, experts).to(dtype)
        ids = torch.arange(count).reshape(batch, length) % 7
        if needed <= 1:
            yield (nested,)
            yield (flat,)
            yield (nested[:, :, None],)
            if hidden == hidden_sizes[-1] and any(
                isinstance(m, LOOKUP_TABLES) for m in module.modules()
            ):
                yield (ids,)
            continue
        if needed == 3:
            yield flat, index, weights
            yield flat, weights, index
        if needed == 2:
            yield flat, index
            yield flat, logits
            yield flat, torch.rand(count, experts).to(dtype)
            yield flat, torch.bincount(index[:, 0], minlength=experts).tolist()
        extras: list[Any] = [ids, nested, None]
        if needed <= 4:
            yield from ((nested, *rest) for rest in itertools.product(extras, repeat=needed - 1))
        else:
            yield from ((nested, *([extra] * (needed - 1))) for extra in extras)


def _required(module: nn.Module) -> int:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in plain and p.default is inspect.Parameter.empty]
    return max(1, len(needed))


def best_trace(
    block: Node,
    stacks: Sequence[Leaf],
    everything: Sequence[Leaf],
    hidden_sizes: Sequence[int],
    experts: int,
    routers: Sequence[Leaf] = (),
) -> Trace:
    """The first complete run of a copy of `block` on plausible inputs, else what saw most."""
    best = Trace(error="the block's forward was not called")
    try:
        shadow = Shadow(block, stacks, everything, routers)
    except Exception as error:  # noqa: BLE001 - and so may a foreign __deepcopy__
        best.error = f"the block cannot be copied ({type(error).__name__})"
        return best
    with torch.random.fork_rng(devices=[]):
        return _first_complete(shadow, best, stacks, hidden_sizes, experts)


def _first_complete(
    shadow: Shadow, best: Trace, stacks: Sequence[Leaf], hidden_sizes: Sequence[int], experts: int
) -> Trace:
    avoid = {experts, *(size for leaf in stacks for size in leaf.shape)}
    calls = argument_lists(shadow.module, hidden_sizes, token_shape(avoid), experts, shadow.dtype)
    for arguments in itertools.islice(calls, _MAX_ATTEMPTS):
        trace = shadow.run(*arguments)
        if trace.completed and trace.contractions:
            return trace
        if len(trace.contractions) > len(best.contractions) or (
            trace.completed and not best.completed
        ):
            best = trace
        elif not best.contractions and not best.completed:
            best.error = trace.error
    return best
