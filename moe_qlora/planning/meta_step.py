"""One training step on the meta device, with a count of what would be allocated.

The step runs for real (forward, the model's own loss, backward, with what layers keep by a level of
`levels.py`), on tensors that have sizes and no contents. A `MemoryTracker` counts each tensor that
an operation makes until its storage dies; on a GPU, memory follows the same reference counts. So
any norm, router, expert or packed Linear layer is counted right; fused attention alone has a
stand-in (`attention.py`).

A `BlockRecorder` reads the tracker at the borders of blocks (the modules that a device map places
whole), so that any split of the blocks over devices can be added up afterwards. Of blocks that
differ in nothing but their place only the first and the last run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_map

from ..kernels.cards import PORTABLE, Card, planned_for
from ..kernels.limits import cdiv
from ..kernels.workspace import PlannedWorkspace, planned
from ..lora.targets import base_model
from ..models.named import quiet
from . import levels
from .attention import fused_attention
from .blocks import packed_parts, top_k_in
from .budget import Activity
from .tracker import MemoryTracker, tensors_of

NO_CAP = 1 << 62
"""Bytes of a workspace that nothing bounds."""

_LOOPS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba_selective_scan")
"""Functions of transformers' models that loop over a sequence."""
_TURNS = 1024  # Tokens of a sequence, up to which they do


@dataclass
class _Readings:
    start: int
    grads: bool = True  # Whether it was entered with gradients enabled
    forward: int = 0
    backward: int = 0
    end: int = 0


class BlockRecorder:
    """Reads a tracker at the borders of blocks, by hooks on their modules."""

    def __init__(self, tracker: MemoryTracker, blocks: dict[str, nn.Module]) -> None:
        self.tracker = tracker
        self.readings: dict[str, _Readings] = {}
        self._in_backward: _Readings | None = None
        self._again: set[str] = set()  # Blocks that were entered with gradients more than once
        self._hooks = ExitStack()
        for name, module in blocks.items():
            enter, leave = partial(self._on_enter, name), partial(self._on_leave, name)
            self._hooks.enter_context(module.register_forward_pre_hook(enter))
            self._hooks.enter_context(module.register_forward_hook(leave))

    def _on_enter(self, name: str, module: nn.Module, args: Any) -> None:
        if self._in_backward is not None:
            return
        grads, before, earlier = torch.is_grad_enabled(), 0, self.readings.get(name)
        if earlier is not None and grads:
            if earlier.grads:
                self._again.add(name)
            else:  # Of a forward without gradients, as of a reference model: this one is read
                self._end_forward()
                before = max(reading.forward for reading in self.readings.values())
                self.readings.clear()
        if name not in self.readings:
            self._end_forward()
            self.readings[name] = _Readings(self.tracker.live, grads, before)

    def _end_forward(self) -> None:
        peak = self.tracker.mark()
        if self.readings:
            last = self.readings[next(reversed(self.readings))]
            last.forward, last.end = max(last.forward, peak), self.tracker.live

    @property
    def ran_twice(self) -> bool:
        """Whether a second forward with gradients followed the first, which is not read."""
        first = {name for name, reading in self.readings.items() if reading.grads}
        return bool(first) and first == self._again

    def _on_leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._in_backward is not None:
            return
        if (tensor := next((t for t in tensors_of(out) if t.requires_grad), None)) is not None:
            tensor.register_hook(lambda grad: self._enter_backward(name))

    def start_backward(self) -> None:
        """Note that forward is over: what follows is the last block's loss and backward."""
        self._end_forward()
        self._enter_backward(next(reversed(self.readings), ""))

    def _enter_backward(self, name: str) -> None:
        self._end_backward()
        self._in_backward = self.readings.setdefault(name, _Readings(0))

    def _end_backward(self) -> None:
        if self._in_backward is not None:
            self._in_backward.backward = max(self._in_backward.backward, self.tracker.mark())

    def close(self) -> None:
        """Take the last reading, and the hooks away."""
        self._end_backward()
        self._hooks.close()


def run_meta_step(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    groups: Sequence[Sequence[str]],
    layers: Sequence[str],
    trained: dict[str, int],
    *,
    batch: int,
    seq: int,
    level: str,
    experts: int = 1,
    card: Card = PORTABLE,
    workspace_cap: int = NO_CAP,
) -> tuple[tuple[Activity, ...], int]:
    """Run one training step on meta, by the kernels that are chosen for a card.

    `groups` are the blocks that are alike, and `layers` the decoder layers, which keep what a
    `level` of `levels.py` says. `trained` are the bytes of the blocks' trained parameters; the
    model chooses among `experts`.

    Returns:
        What each block does, in running order, and the bytes of the workspace, which all blocks of
        a device share.
    """
    batch, seq = _short_sequences(model, batch, seq)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    grad_anchor = torch.zeros((), device="meta", requires_grad=True)
    model.zero_grad(set_to_none=True)
    statistics = (tensor for part in packed_parts(model) for tensor in part.weight.statistics)
    known = [*model.parameters(), *model.buffers(), *statistics, ids, grad_anchor]
    tracker = MemoryTracker(known, experts)
    workspace = PlannedWorkspace(workspace_cap, tracker.empty_uncounted)
    middle = {name for group in groups for name in group[1:-1]}
    with quiet(), ExitStack() as stack, tracker:
        for each in (
            passthroughs(blocks, groups, grad_anchor),
            fused_attention(),
            planned_for(card),
            planned(workspace),
            # A mask as an index (GLM-5's blocks of keys that are no padding) takes all.
            cast("Any", fx_config).patch(meta_nonzero_assume_all_nonzero=True),
            _even_counts(batch * seq * top_k_in(base_model(model))),
            *(_on_level(level, blocks[name]) for name in layers if name not in middle),
        ):
            stack.enter_context(each)
        recorder = BlockRecorder(tracker, blocks)
        try:
            loss = loss_of(model, ids)
            recorder.start_backward()
            loss.backward()
        finally:
            recorder.close()
    model.zero_grad(set_to_none=True)
    return activities_of(recorder.readings, groups, trained), workspace.nbytes


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


def activities_of(
    readings: dict[str, _Readings], groups: Sequence[Sequence[str]], trained: dict[str, int]
) -> tuple[Activity, ...]:
    """Return the activities of the blocks that ran, and of those that stand for them in a group."""
    stands_for = {name: group[-1] for group in groups for name in group[1:-1]}
    by_name: dict[str, Activity] = {}
    later = 0
    for name, block in reversed(readings.items()):
        if name not in stands_for:
            # Less than none is saved where what the blocks before it share is freed, such as masks.
            peaks = (max(size - block.start, 0) for size in (block.forward, block.backward - later))
            by_name[name] = Activity(name, block.end - block.start, *peaks)
            later += trained.get(name, 0)
    return tuple(replace(by_name[stands_for.get(name, name)], name=name) for name in readings)


@contextmanager
def passthroughs(
    blocks: dict[str, nn.Module], groups: Sequence[Sequence[str]], grad_anchor: Tensor
) -> Iterator[None]:
    """Replace all blocks of a group but the first and the last by a copy of their hidden states."""
    with ExitStack() as undo:
        for first, *middle, _ in groups:
            like = _Like(grad_anchor)
            undo.enter_context(blocks[first].register_forward_hook(like.remember, with_kwargs=True))
            for module in (blocks[name] for name in middle):
                undo.enter_context(_forward_of(module, like.forward))
        yield


class _Like:
    """Returns tensors of the sizes that the first block of a group returned."""

    def __init__(self, grad_anchor: Tensor) -> None:
        self.grad_anchor = grad_anchor
        self.makers: Any = None  # Its output, with a function of the hidden states for each tensor

    def remember(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        hidden = _hidden_states(args, kwargs)
        kind = (hidden.shape, hidden.dtype)

        def maker(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return lambda hidden: item
            shape, dtype = item.shape, item.dtype
            if (shape, dtype) == kind:
                return lambda hidden: hidden + self.grad_anchor  # with a gradient
            return lambda hidden: hidden.new_empty(shape, dtype=dtype)

        if self.makers is None:
            self.makers = tree_map(maker, out)

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states(args, kwargs)
        return tree_map(lambda make: make(hidden), self.makers)


def _hidden_states(args: Any, kwargs: Any) -> Tensor:
    items = (*args, *kwargs.values())
    return next(x for x in items if isinstance(x, Tensor) and x.is_floating_point())
