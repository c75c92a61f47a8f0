"""One training step on the meta device, with a count of what would be allocated.

The step runs for real (forward, the model's own loss, backward, with what layers keep by a level of
`levels.py`), on tensors that have sizes and no contents. A `MemoryTracker` counts each tensor that
an operation makes until its storage dies; on a GPU, memory follows the same reference counts. So
any norm, router, expert or packed Linear layer is counted right; fused attention alone has a
stand-in (`attention.py`).

`record_step` reads a tracker at the borders of blocks (the modules that a device map places whole),
so that any split of the blocks over devices can be added up afterwards; `measure.py` records a real
step by it. Of blocks that differ in nothing but their place only the first and the last run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_map

from ..errors import ConfigError
from ..kernels.cards import PORTABLE, Card, planned_for
from ..kernels.limits import cdiv
from ..kernels.workspace import PlannedWorkspace, planned
from ..lora.targets import base_model
from ..models.named import quiet
from . import levels
from .attention import fused_attention
from .blocks import block_modules, packed_parts, top_k_in
from .budget import Activity
from .meta_model import MetaModel
from .tracker import MemoryTracker, tensors_of

NO_CAP = 1 << 62
"""Bytes of a workspace that nothing bounds."""

_LOOPS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba_selective_scan")
"""Functions of transformers' models that loop over a sequence."""
_TURNS = 1024  # Tokens of a sequence, up to which they do


def record_step(
    tracker: Any,
    blocks: dict[str, nn.Module],
    groups: Sequence[Sequence[str]],
    trained: dict[str, int],
    anchor: Tensor,
    weights: Sequence[Tensor],
    loss: Callable[[], Tensor],
    *,
    once: bool = False,
) -> tuple[Activity, ...]:
    """Run a step and read a tracker at the borders of blocks, by hooks on their modules.

    `tracker` has `live` bytes, and `mark()`, the most since the mark before. Of `groups`, blocks
    that are alike, the first and the last run, and stand for the others; `anchor` is a scalar with
    a gradient, for these. `trained` are the bytes of trained parameters of each block, and
    `weights` these parameters. With `once`, a `loss` that runs the model twice is a `ConfigError`.

    Returns:
        What each block does, in running order.
    """
    read: dict[str, dict[str, int]] = {}  # Block -> live bytes at its start and end, its peaks
    with_gradients: set[str] = set()
    twice: set[str] = set()
    in_backward: dict[str, int] | None = None
    start = tracker.live

    def end_section() -> None:
        peak = tracker.mark()
        if in_backward is not None:
            in_backward["backward"] = max(in_backward["backward"], peak)
        elif read:
            last = read[next(reversed(read))]
            last["forward"], last["end"] = max(last["forward"], peak), tracker.live

    def enter(name: str, module: nn.Module, args: Any) -> None:
        if in_backward is not None:
            return
        grads, before = torch.is_grad_enabled(), 0
        if name in read and grads:
            if name in with_gradients:
                twice.add(name)
            else:  # Of a forward without gradients, as of a reference model: this one is read
                end_section()
                before = max(block["forward"] for block in read.values())
                read.clear()
        if name not in read:
            end_section()
            read[name] = {"start": tracker.live, "forward": before, "backward": 0, "end": 0}
            with_gradients.update({name} if grads else ())

    def enter_backward(name: str) -> None:
        nonlocal in_backward
        end_section()
        empty = {"start": 0, "forward": 0, "backward": 0, "end": 0}
        in_backward = read.setdefault(name, empty)

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> None:
        found = next((t for t in tensors_of(out) if t.requires_grad), None)
        if in_backward is None and found is not None:
            found.register_hook(lambda grad: enter_backward(name))

    with ExitStack() as hooks:
        hooks.enter_context(_passthroughs(blocks, groups, anchor))
        for name, module in blocks.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        value = loss()
        if once and twice and twice == with_gradients & read.keys():
            raise ConfigError(
                "loss runs the model more than once with gradients, and one forward is "
                "measured: let it concatenate its batches, as TRL's trainers do."
            )
        # What follows is the last block's loss and backward.
        enter_backward(next(reversed(read), ""))
        # Not `backward`: hooks of DDP wait for the gradients of all layers.
        grads = torch.autograd.grad(value, weights, allow_unused=True)
        del grads, value
        end_section()
    # What the model makes before its first block, such as a cache, counts there.
    next(iter(read.values()))["start"] = start
    stands_for = {name: group[-1] for group in groups for name in group[1:-1]}
    found: dict[str, Activity] = {}
    later = 0
    for name, block in reversed(read.items()):
        if name not in stands_for:
            # Less than none is saved where what the blocks before it share is freed, such as masks.
            forward, backward = block["forward"], block["backward"] - later
            peaks = (max(size - block["start"], 0) for size in (forward, backward))
            found[name] = Activity(name, block["end"] - block["start"], *peaks)
            later += trained.get(name, 0)
    return tuple(replace(found[stands_for.get(name, name)], name=name) for name in read)


def run_meta_step(
    meta: MetaModel,
    itemsize: int,
    *,
    batch: int,
    seq: int,
    level: str,
    card: Card = PORTABLE,
    workspace_cap: int = NO_CAP,
) -> tuple[tuple[Activity, ...], int]:
    """Run one training step on meta, by the kernels that are chosen for a card.

    Decoder layers keep what a `level` of `levels.py` says; `itemsize` is that of the adapters.

    Returns:
        What each block does, in running order, and the bytes of the workspace, which all blocks of
        a device share.
    """
    model, groups = meta.model, meta.groups
    blocks = block_modules(meta.base)
    blocks |= {name: meta.base.get_submodule(name) for name in meta.emptied}
    trained = {block.name: itemsize * sum(block.trained) for block in meta.blocks}
    experts = max((param.num_experts for param in meta.layout.experts), default=1)
    batch, seq = _short_sequences(model, batch, seq)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    grad_anchor = torch.zeros((), device="meta", requires_grad=True)
    statistics = (tensor for part in packed_parts(model) for tensor in part.weight.statistics)
    known = [*model.parameters(), *model.buffers(), *statistics, ids, grad_anchor]
    tracker = MemoryTracker(known, experts)
    workspace = PlannedWorkspace(workspace_cap, tracker.empty_uncounted)
    middle = {name for group in groups for name in group[1:-1]}
    layers = [block.name for block in meta.blocks if block.layer and block.name not in middle]
    with quiet(), ExitStack() as stack, tracker:
        for each in (
            fused_attention(),
            planned_for(card),
            planned(workspace),
            # A mask as an index (GLM-5's blocks of keys that are no padding) takes all.
            cast("Any", fx_config).patch(meta_nonzero_assume_all_nonzero=True),
            _even_counts(batch * seq * top_k_in(meta.base)),
            *(_on_level(level, blocks[name]) for name in layers),
        ):
            stack.enter_context(each)
        weights = [grad_anchor, *(p for p in model.parameters() if p.requires_grad)]
        loss = partial(loss_of, model, ids)
        found = record_step(tracker, blocks, groups, trained, grad_anchor, weights, loss)
    return found, workspace.nbytes


def _even_counts(total: int) -> Any:
    """Let meta tensors of counts be read, as JetMoE's of tokens for each expert: `total` evenly."""
    stock = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        if not tensor.is_meta or tensor.dim() != 1:
            return stock(tensor)
        count = len(tensor)
        return [total // count + (place < total % count) for place in range(count)]

    return patch.object(Tensor, "tolist", tolist)


def _short_sequences(model: nn.Module, batch: int, seq: int) -> tuple[int, int]:
    """Return sizes of as many tokens in which loops over a sequence take fewer turns.

    transformers computes a gated delta rule or a selective scan chunk by chunk, or token by token,
    where no kernel for it is installed. What each turn allocates is the same for k sequences as for
    one that is k times as long; fused attention, which these models have beside it, too.
    """
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    loops = any(hasattr(home, name) for home in homes for name in _LOOPS)
    parts = seq // _TURNS if loops and seq > _TURNS else 1
    return batch * parts, cdiv(seq, parts)


def _on_level(level: str, layer: nn.Module) -> Any:
    """Return a context in which a decoder layer keeps what a level says."""
    own = layer.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return levels.compute(level, own, args, kwargs)

    return _forward_of(layer, forward)


@contextmanager
def _forward_of(module: nn.Module, forward: Any) -> Iterator[None]:
    """In this block, a module's forward is a function of (self, ...)."""
    own = {key: value for key, value in vars(module).items() if key == "forward"}
    module.__dict__["forward"] = MethodType(forward, module)
    try:
        yield
    finally:
        vars(module).pop("forward")
        vars(module).update(own)


def loss_of(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Return the model's own loss of a batch, or a number made of its first output.

    Token ids are no labels of a model that classifies. `more` are other arguments of its forward.
    """
    classifies = hasattr(base_model(model), "num_labels")
    try:
        labels = {} if classifies else {"labels": ids}
        loss = getattr(model(input_ids=ids, **labels, **more), "loss", None)
    except TypeError:
        loss = None
    if loss is None:
        out = tensors_of(model(input_ids=ids, **more))
        loss = next(tensor for tensor in out if tensor.requires_grad).float().mean()
    return loss


@contextmanager
def _passthroughs(
    blocks: dict[str, nn.Module], groups: Sequence[Sequence[str]], anchor: Tensor
) -> Iterator[None]:
    """Let the blocks between a group's first and last return tensors like those of the first."""

    def remember(makers: list[Any], module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        hidden = _hidden_states(args, kwargs)
        kind = (hidden.shape, hidden.dtype)

        def maker(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return lambda hidden: item
            shape, dtype = item.shape, item.dtype
            if (shape, dtype) == kind:
                return lambda hidden: hidden + anchor  # with a gradient
            return lambda hidden: hidden.new_empty(shape, dtype=dtype)

        makers += [] if makers else [tree_map(maker, out)]

    def copy(makers: list[Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        return tree_map(lambda make: make(hidden), makers[0])

    with ExitStack() as undo:
        for first, *middle, _ in groups:
            makers: list[Any] = []
            hook = partial(remember, makers)
            undo.enter_context(blocks[first].register_forward_hook(hook, with_kwargs=True))
            for name in middle:
                undo.enter_context(_forward_of(blocks[name], partial(copy, makers)))
        yield


def _hidden_states(args: Any, kwargs: Any) -> Tensor:
    items = (*args, *kwargs.values())
    return next(x for x in items if isinstance(x, Tensor) and x.is_floating_point())
