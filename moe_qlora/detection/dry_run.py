"""Run a copy of one block on plausible inputs: small tensors are random, big ones on meta."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .trace import BlockTrace, PythonReads, Trace
from .tree import LOOKUP_TABLES, Leaf, Node, is_adapter

# Routers, norms and biases stay below this many elements at every published size (384 x 7168 is
# the largest router).
_SMALL = 1 << 22
_MAX_ATTEMPTS = 24
# Batch and length of inputs: the first pair is used in which no number, nor the product, is a size
# of a weight.
_TOKENS = ((2, 3), (2, 5), (3, 5), (2, 7), (3, 7), (5, 7), (3, 11), (7, 11), (11, 13))
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_REDIRECTION = threading.RLock()


def best_trace(
    block: Node,
    members: Sequence[Leaf],
    everything: Sequence[Leaf],
    hidden_sizes: Sequence[int],
    experts: int,
    routers: Sequence[Leaf] = (),
) -> Trace:
    """Return the first complete run of a copy of `block`, else the run with most contractions.

    `everything` are all leaves of the model; `members[i]` has the key i in the trace. Sizes are
    tried in order; `routers` choose among `experts`.
    """
    best = Trace(error="the block's forward was not called")
    try:
        block_copy = _BlockCopy(block, members, everything, routers)
    except Exception as error:  # noqa: BLE001 - a foreign __deepcopy__ may raise anything
        best.error = f"the block cannot be copied ({type(error).__name__})"
        return best
    sizes = {experts, *(size for leaf in members for size in leaf.shape)}
    tokens = next((pair for pair in _TOKENS if not {*pair, math.prod(pair)} & sizes), _TOKENS[-1])
    with torch.random.fork_rng(devices=[]):
        calls = _argument_lists(block_copy.module, hidden_sizes, tokens, experts, block_copy.dtype)
        for arguments in itertools.islice(calls, _MAX_ATTEMPTS):
            trace = block_copy.run(*arguments)
            if trace.completed and trace.contractions:
                return trace
            if len(trace.contractions) > len(best.contractions) or (
                trace.completed and not best.completed
            ):
                best = trace
            elif not best.contractions and not best.completed:
                best.error = trace.error
    return best


class _BlockCopy:
    """A runnable copy of `block`; the arguments are those of `best_trace`.

    Members are on meta in the copy, and so is every weight outside the block, for blocks that refer
    back to their parent.
    """

    def __init__(
        self,
        block: Node,
        members: Sequence[Leaf],
        everything: Iterable[Leaf],
        routers: Iterable[Leaf],
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        inside = set(block.subtree())
        memo: dict[int, Any] = {}
        self._copies: dict[Leaf, torch.Tensor] = {}
        for leaf in everything:
            big = leaf in members or leaf.numel > _SMALL or leaf.node not in inside
            self._copies[leaf] = memo[id(leaf.tensor)] = self._replacement(leaf, big)
        self._weights = [self._copies[leaf] for leaf in members]
        self._routers = [self._copies[leaf] for leaf in routers]
        self.dtype = _run_dtype(members[0].dtype)
        for node in inside:
            # Decoders are not copied: the copy has no packed weights.
            decoders = node.module._modules.get("parametrizations")
            if decoders is not None:
                memo[id(decoders)] = nn.ModuleDict()
            # Hooks are not copied: their targets may be loggers and the like.
            for name in _HOOKS:
                if hooks := node.module.__dict__.get(name):
                    memo[id(hooks)] = type(hooks)()
        with torch.device("cpu"):
            self.module: nn.Module = copy.deepcopy(block.module, memo)
        for node in block.subtree():
            path = node.name.removeprefix(block.name).removeprefix(".")
            self._make_plain(node, self.module.get_submodule(path))
        for owner in list(self.module.modules()):  # adapters, which may need packed weights
            inner: Any = owner._modules
            for name in inner:
                while is_adapter(inner[name]):
                    inner[name] = inner[name].base_layer

    def _replacement(self, leaf: Leaf, big: bool) -> torch.Tensor:
        floating = leaf.dtype.is_floating_point or leaf.packed is not None
        dtype = _run_dtype(leaf.dtype) if floating else leaf.dtype
        if big:
            value = torch.empty(leaf.shape, dtype=dtype, device="meta")
        elif not dtype.is_floating_point:
            value = torch.zeros(leaf.shape, dtype=dtype)
        else:
            value = torch.randn(leaf.shape, generator=self.generator).mul_(0.5).to(dtype)
        return value if leaf.kind == "buffer" else nn.Parameter(value, requires_grad=False)

    def _make_plain(self, node: Node, module: Any) -> None:
        """Make a module of the copy ready to run: in eval mode, unpacked, without wrappers."""
        module.training = False
        # accelerate's forward moves tensors between devices; that of expert parallelism exchanges
        # tokens with other ranks, which may not run detection now. Experts of transformers'
        # interface have an eager forward under any replacement.
        wrapped = "_old_forward" in module.__dict__ or getattr(module, "_is_expert_parallel", False)
        if wrapped or hasattr(module, "_apply_gate"):
            module.__dict__.pop("forward", None)
        config: Any = module.__dict__.get("config")
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
        if "parametrizations" in module._modules:
            del module._modules["parametrizations"]
            module.__class__ = type(module).__mro__[1]
            for leaf in node.leaves:
                if leaf.attribute not in module._parameters and leaf.kind == "bare":
                    module.register_parameter(leaf.attribute, self._copies[leaf])
        elif isinstance(module, nn.Linear) and any(leaf.packed for leaf in node.leaves):
            module.__class__ = nn.Linear

    def run(self, *args: Any) -> Trace:
        """Run the copy's forward and trace it; an error ends the trace."""
        watch = BlockTrace(self._weights, self.generator)
        watch.follow(args, self._routers)
        try:
            # Output of the forward is discarded. Redirection affects the whole process, so only one
            # thread at a time may do it.
            silent = contextlib.redirect_stdout(io.StringIO())
            with _REDIRECTION, silent, torch.no_grad(), PythonReads(watch), watch:
                self.module(*args)
            watch.trace.completed = True
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            text = str(error)
            watch.trace.error = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        return watch.trace


def _run_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _FLOATS else torch.float32


def _argument_lists(
    module: nn.Module,
    hidden_sizes: Sequence[int],
    tokens: tuple[int, int],
    experts: int,
    dtype: torch.dtype,
) -> Iterator[tuple[Any, ...]]:
    batch, length = tokens
    count = batch * length
    top_k = min(2, experts)
    needed = 1
    with contextlib.suppress(TypeError, ValueError):  # a forward without a signature
        parameters = inspect.signature(module.forward).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = sum(p.kind in plain and p.default is p.empty for p in parameters)
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
            embeds = any(isinstance(inner, LOOKUP_TABLES) for inner in module.modules())
            if embeds and hidden == hidden_sizes[-1]:
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
