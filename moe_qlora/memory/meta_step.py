"""A training step rehearsed on the meta device, with a ledger of what would be allocated.

The step runs for real (forward, the model's own loss, backward, under checkpointing where the model
has it), on tensors that have sizes and no contents. Each tensor that an operation makes is entered
in the ledger and struck out when its storage dies, as on a GPU, where frees follow the same
reference counts. No formula of a layer is needed for that, so that any attention, norm or router is
counted right; only packed layers and fused kernels have stand-ins (`memory/meta_ops.py`).

The ledger is read at the borders of blocks (the modules that a device map places whole):

    kept       what is alive when the next block starts, beyond what was when this one did
    forward    the most that is alive in between, beyond that start
    backward   the most while this block's gradients are computed, beyond that start, and beyond the
               gradients of later blocks' adapters

so that any split of the blocks over devices can be added up afterwards (`memory/budget.py`). Blocks
that differ in nothing but their place are rehearsed twice, the first and the last of them; those in
between hand their input on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..build import quiet
from .budget import Activity
from .meta_ops import FusedAttention, echo

_GRAIN = 512  # the caching allocator's smallest step
_PLACES = {"layer_idx", "layer_number", "layer_id", "block_idx", "layer_index", "training"}


class Ledger(TorchDispatchMode):
    """Bytes of meta storages that are alive, and the most since `mark`.

    Args:
        known: Tensors whose storages are not counted: weights and inputs.
        experts: How many experts the model chooses among.
    """

    def __init__(self, known: Sequence[Tensor], experts: int = 1) -> None:
        super().__init__()
        self.experts = experts
        self.live = 0
        self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {storage._cdata for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # What models ask of contents is whether there is padding, packing or overflow.
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            out = self._nonzero(args[0])
        else:
            out = func(*args, **(kwargs or {}))
        for item in tree_flatten(out)[0]:
            if isinstance(item, Tensor):
                self._enter(item)
        return out

    def mark(self) -> int:
        """Start a new section; returns the most that was alive in the one before."""
        peak, self.peak = self.peak, self.live
        return peak

    def _nonzero(self, mask: Tensor) -> Tensor:
        """Places in a mask: models ask which experts have tokens (all), and which tokens of one."""
        count = mask.numel() if mask.numel() <= self.experts else mask.numel() // self.experts
        return torch.empty((count, mask.dim()), dtype=torch.long, device="meta")

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // _GRAIN) * _GRAIN
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._strike, key, size).atexit = False

    def _strike(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@dataclass
class _Section:
    """One block in one rehearsal: ledger readings."""

    name: str
    start: int
    forward: int = 0
    backward: int = 0
    end: int = 0


class _Scribe:
    """Reads the ledger at the borders of blocks."""

    def __init__(self, ledger: Ledger, blocks: dict[str, nn.Module]) -> None:
        self.ledger = ledger
        self.sections: list[_Section] = []
        self.handles: list[Any] = []
        self._by_name: dict[str, _Section] = {}
        self._backward: _Section | None = None
        for name, module in blocks.items():
            self.handles.append(module.register_forward_pre_hook(self._enter(name)))
            self.handles.append(module.register_forward_hook(self._leave(name)))

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._backward is None and name not in self._by_name:
                self._close()
                section = _Section(name, self.ledger.live)
                self.sections.append(section)
                self._by_name[name] = section

        return hook

    def _close(self) -> None:
        peak = self.ledger.mark()
        if self.sections:
            self.sections[-1].forward = peak
            self.sections[-1].end = self.ledger.live

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if self._backward is not None:
                return
            for item in tree_flatten(out)[0]:
                if isinstance(item, Tensor) and item.requires_grad:
                    item.register_hook(lambda grad: self._turn(name))
                    break

        return hook

    def turn(self) -> None:
        """Forward is over: what follows is the last block's loss and backward."""
        self._close()
        if not self.sections:
            self.sections.append(_Section("", 0))
        self._backward = self.sections[-1]

    def _turn(self, name: str) -> None:
        assert self._backward is not None
        peak = self.ledger.mark()
        self._backward.backward = max(self._backward.backward, peak)
        self._backward = self._by_name[name]

    def close(self) -> None:
        if self._backward is not None:
            self._backward.backward = max(self._backward.backward, self.ledger.mark())
        for handle in self.handles:
            handle.remove()


def rehearse(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    trained: dict[str, int],
    *,
    batch: int,
    seq: int,
    experts: int = 1,
    every_layer: bool = False,
) -> tuple[Activity, ...]:
    """Rehearse one training step.

    Args:
        model: On meta, packed and with adapters, in training mode.
        blocks: The modules that a device map places whole, by name.
        trained: Bytes of the trained parameters of each block.
        batch: Sequences.
        seq: Tokens in each.
        experts: How many experts the model chooses among.
        every_layer: Rehearse each block, those that are alike included.

    Returns:
        What each block does, in the order in which they run.
    """
    groups = [] if every_layer else _alike(blocks)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    spark = torch.zeros((), device="meta", requires_grad=True)
    model.zero_grad(set_to_none=True)
    ledger = Ledger([*model.parameters(), *model.buffers(), ids, spark], experts)
    with quiet(), _echoes(blocks, groups, spark), ledger, FusedAttention():
        scribe = _Scribe(ledger, blocks)
        try:
            loss = _loss(model, ids)
            scribe.turn()
            loss.backward()
        finally:
            scribe.close()
    model.zero_grad(set_to_none=True)
    return _activities(scribe.sections, groups, trained)


def checkpointed(model: Any) -> None:
    """Switch checkpointing on, non-reentrant, so that recomputed layers meet the stand-ins too."""
    # Function modes do not reach into backward; what checkpointing computes again has this way in.
    how = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), FusedAttention())}
    with quiet():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _loss(model: Any, ids: Tensor) -> Tensor:
    try:
        loss = getattr(model(input_ids=ids, labels=ids), "loss", None)
    except TypeError:
        loss = None
    if loss is None:
        out = tree_flatten(model(input_ids=ids))[0]
        loss = next(item for item in out if isinstance(item, Tensor) and item.requires_grad)
        loss = loss.float().mean()
    return loss


def _activities(
    sections: list[_Section], groups: list[list[str]], trained: dict[str, int]
) -> tuple[Activity, ...]:
    double = {name: group[-1] for group in groups for name in group[1:-1]}
    found: dict[str, Activity] = {}
    later = 0
    for section in reversed(sections):
        if section.name not in double:
            found[section.name] = Activity(
                section.name,
                max(section.end - section.start, 0),
                max(section.forward - section.start, 0),
                max(section.backward - section.start - later, 0),
            )
            later += trained.get(section.name, 0)
    return tuple(
        replace(found[double.get(section.name, section.name)], name=section.name)
        for section in sections
    )


def _alike(blocks: dict[str, nn.Module]) -> list[list[str]]:
    """Blocks that differ in nothing but their place, three or more of them, in order."""
    groups: dict[Any, list[str]] = {}
    for name, module in blocks.items():
        groups.setdefault(_signature(module), []).append(name)
    return [names for names in groups.values() if len(names) > 2]


def _signature(module: nn.Module) -> Any:
    shapes = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )
    settings = tuple(
        (name, type(part).__name__, key, value)
        for name, part in module.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, float, str)) and not (key in _PLACES or key[0] == "_")
    )
    return type(module), shapes, settings


@contextmanager
def _echoes(blocks: dict[str, nn.Module], groups: list[list[str]], spark: Tensor) -> Iterator[None]:
    """Within, all of a group but its first and its last hand their hidden states on."""
    handles = []
    middle = [blocks[name] for group in groups for name in group[1:-1]]
    for first, *rest, _ in groups:
        form: list[Any] = []
        hook = blocks[first].register_forward_hook(_note(form), with_kwargs=True)
        handles.append(hook)
        for name in rest:
            module = blocks[name]
            module.__dict__["forward"] = MethodType(_echo_forward(form, spark), module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in middle:
            module.__dict__.pop("forward", None)


def _note(form: list[Any]) -> Any:
    """A hook that remembers what a block gives out: None for the hidden states, sizes else."""

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        hidden = _hidden(args, kwargs)
        if not form:
            form.append(tree_map(lambda item: _size(item, hidden), out))

    return hook


@dataclass(frozen=True)
class _Size:
    shape: tuple[int, ...]
    dtype: torch.dtype
    hidden: bool


def _size(item: Any, hidden: Tensor) -> Any:
    if not isinstance(item, Tensor):
        return item
    like = item.shape == hidden.shape and item.dtype == hidden.dtype
    return _Size(tuple(item.shape), item.dtype, like)


def _hidden(args: Any, kwargs: Any) -> Tensor:
    given = [*args, *kwargs.values()]
    return next(item for item in given if isinstance(item, Tensor) and item.is_floating_point())


def _echo_forward(form: list[Any], spark: Tensor) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)

        def make(item: Any) -> Any:
            if not isinstance(item, _Size):
                return item
            if item.hidden:
                return echo(hidden, spark)
            return torch.empty(item.shape, dtype=item.dtype, device="meta")

        return tree_map(make, form[0])

    return forward
