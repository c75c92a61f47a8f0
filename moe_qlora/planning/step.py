"""One training step of a model on meta, or of a real one, with the bytes that each block allocates.

The step runs for real (forward, loss, backward, with what layers keep by a level of `levels.py`).
On meta, tensors have sizes and no contents: a `MemoryTracker` counts each one that an operation
makes until its storage dies; on a GPU, memory follows the same reference counts. So any norm,
router, expert or packed Linear layer is counted right; fused attention alone has a stand-in
(`attention.py`). Of a real model, torch's allocator says what was allocated on CUDA, compiled code
and foreign kernels included; on a CPU, tensors are counted, and everything runs eagerly.

Either is read at the borders of blocks, so that any split of the blocks over devices can be added
up afterwards. Of blocks that differ in nothing but their place only the first and the last run.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ConfigError, first_line
from ..kernels.cards import PORTABLE, Card, planned_for
from ..kernels.limits import cdiv
from ..kernels.workspace import PlannedWorkspace, planned
from ..layout import base_model
from ..lora.config import top_k_of
from ..models.named import quiet
from ..world import world
from . import levels
from .attention import fused_attention
from .budget import Activity
from .model import MetaModel, StepModel, known_tensors

NO_CAP = 1 << 62  # Bytes of a workspace that nothing bounds

Loss = Callable[[Any, dict[str, Any]], Tensor]
"""(model, batch) -> the loss of the batch, a dict with `input_ids` and `labels` (batch, seq)."""

_GRAIN = 512  # The caching allocator's smallest step, in bytes
_INSIDE: dict[str, torch.dtype | None] = {
    # CUDA's first multiplies the gradient by the output.
    "aten::_softmax_backward_data": None,
    # The sums of products, before they are scaled.
    "bitsandbytes::int8_scaled_mm": torch.int32,
}
"""Operators that allocate a tensor of their output's shape inside, and its dtype if another."""

_LOOPS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba_selective_scan")
"""Functions of transformers' models that loop over a sequence."""
_TURNS = 1024  # Tokens of a sequence, up to which they do


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, dicts and the like."""
    leaves = [tree] if isinstance(tree, Tensor) else tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class MemoryTracker(TorchDispatchMode):
    """A count of the bytes of storages that are alive, and of the most since `mark`.

    The storages of `known`, weights and inputs, are not counted. The model chooses among `experts`.
    """

    def __init__(self, known: Sequence[Tensor], experts: int = 1, grain: int = _GRAIN) -> None:
        super().__init__()
        self.experts, self.grain = experts, grain
        self.live = self.peak = 0
        self._uncounted = False
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {storage._cdata for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # What models ask of contents is whether there is padding, packing or overflow.
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            # Places in a mask: which experts have tokens (all), or which tokens are of one.
            count = args[0].numel() // (1 if args[0].numel() <= self.experts else self.experts)
            out: Any = torch.empty((count, args[0].dim()), dtype=torch.long, device="meta")
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            self._count(tensor)
        if func._schema.name in _INSIDE and out.is_meta:
            self._count(torch.empty_like(out, dtype=_INSIDE[func._schema.name]))
        return out

    def empty_uncounted(self, nbytes: int) -> Tensor:
        """Return a tensor of bytes on meta that is not counted, nor are its views."""
        with patch.object(self, "_uncounted", True):
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def mark(self) -> int:
        """Start a new section, and return the most that was alive in the one before."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        if self._uncounted:
            self._known.append(storage)
            return
        size = cdiv(storage.nbytes(), self.grain) * self.grain
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class _Allocator:
    """The same readings, of torch's allocator on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark()

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def mark(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def record_step(
    step: StepModel, tracker: Any, loss: Callable[[], Tensor], device: Any, *, once: bool = False
) -> tuple[Activity, ...]:
    """Run a step and read a tracker at the borders of blocks, by hooks on their modules.

    `tracker` has `live` bytes, and `mark()`, the most since the mark before. With `once`, a `loss`
    that runs the model twice is a `ConfigError`.

    Returns:
        What each block does, in running order.
    """
    blocks = step.modules
    anchor = torch.zeros((), device=device, requires_grad=True)  # For blocks that do not run
    read: dict[str, dict[str, int]] = {}  # Block -> live bytes at its start and end, its peaks
    empty = dict.fromkeys(("start", "gathered", "forward", "backward", "end"), 0)
    whole = dict(zip(blocks, map(world().gathered_nbytes, blocks.values()), strict=True))
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
            read[name] = empty | {"start": tracker.live, "forward": before}
            with_gradients.update({name} if grads else ())

    def follow_gather(name: str, module: nn.Module, args: Any) -> None:
        if whole[name] and name == next(reversed(read)):
            # FSDP2 holds a gather's buffer until the next gather: the first layer alone adds one
            peak, start = tracker.mark(), tracker.live - whole[name]
            read[name] |= {"start": start, "gathered": max(peak - start, whole[name])}

    def enter_backward(name: str) -> None:
        nonlocal in_backward
        end_section()
        in_backward = read.setdefault(name, {**empty})

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> None:
        found = next((t for t in tensors_of(out) if t.requires_grad), None)
        if in_backward is None and found is not None:
            found.register_hook(lambda grad: enter_backward(name))

    with ExitStack() as hooks:
        hooks.enter_context(_passthroughs(blocks, step.groups, anchor))
        for name, module in blocks.items():
            # Before FSDP2 gathers, and after: what it gathers is not kept, nor worked with
            entering = module.register_forward_pre_hook(partial(enter, name), prepend=True)
            hooks.enter_context(entering)
            gathered = module.register_forward_pre_hook(partial(follow_gather, name))
            hooks.enter_context(gathered)
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        value = loss()
        if once and twice and twice == with_gradients & read.keys():
            raise ConfigError(
                "loss runs the model more than once with gradients, and one forward is "
                "measured: let it concatenate its batches, as TRL's trainers do."
            )
        # What follows is the last block's loss and backward.
        enter_backward(next(reversed(read), ""))
        _backward(step, value, anchor)
        del value
        end_section()
    # What the model makes before its first block, such as a cache, counts there.
    next(iter(read.values()))["start"] = start
    return _activities(step, read, whole)


def _activities(
    step: StepModel, read: dict[str, dict[str, int]], whole: Mapping[str, int]
) -> tuple[Activity, ...]:
    """Return what blocks do by what was read of them, in running order."""
    trained = {block.name: step.itemsize * sum(block.trained) for block in step.blocks}
    stands_for = {name: group[-1] for group in step.groups for name in group[1:-1]}
    found: dict[str, Activity] = {}
    later, end = 0, read[next(reversed(read))]["end"]
    for name, block in reversed(read.items()):
        # Less than none is saved where what the blocks before it share is freed, such as masks.
        start, saved, end = block["start"], end - block["start"], block["start"]
        if name not in stands_for:
            forward = max(block["forward"] - start - whole[name], 0)
            backward = max(block["backward"] - later - start - whole[name], 0)
            found[name] = Activity(name, saved, forward, backward, block["gathered"])
            later += trained.get(name, 0)
    return tuple(replace(found[stands_for.get(name, name)], name=name) for name in read)


def _backward(step: StepModel, loss: Tensor, anchor: Tensor) -> None:
    if world().uses_fsdp(step.model):
        loss.backward()  # Its hooks gather and reduce in no other
    else:  # DDP's would wait for the gradients of all layers
        torch.autograd.grad(loss, [anchor, *step.trained], allow_unused=True)


@contextmanager
def _passthroughs(
    blocks: dict[str, nn.Module], groups: Sequence[Sequence[str]], anchor: Tensor
) -> Iterator[None]:
    """Let the blocks between a group's first and last return tensors like those of the first."""

    def hidden_states(args: Any, kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        return next(t for t in given if isinstance(t, Tensor) and t.is_floating_point())

    def remember(makers: list[Any], module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        hidden = hidden_states(args, kwargs)
        kind = (hidden.shape, hidden.dtype)

        def maker(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return lambda hidden: item
            shape, dtype = item.shape, item.dtype
            if (shape, dtype) == kind:
                return lambda hidden: hidden + anchor  # with a gradient
            return lambda hidden: hidden.new_empty(shape, dtype=dtype)

        makers += [] if makers else [tree_map(maker, out)]

    def copy(makers: list[Any], *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_states(args, kwargs)
        return tree_map(lambda make: make(hidden), makers[0])

    with ExitStack() as undo:
        for first, *middle, _ in groups:
            makers: list[Any] = []
            hook = partial(remember, makers)
            undo.enter_context(blocks[first].register_forward_hook(hook, with_kwargs=True))
            for name in middle:
                own = patch.dict(vars(blocks[name]), forward=partial(copy, makers))
                undo.enter_context(own)
        yield


def run_meta_step(
    meta: MetaModel,
    *,
    batch: int,
    seq: int,
    level: str,
    card: Card = PORTABLE,
    workspace_cap: int = NO_CAP,
) -> tuple[tuple[Activity, ...], int]:
    """Run one training step on meta, by the kernels that are chosen for a card.

    Decoder layers keep what a `level` of `levels.py` says.

    Returns:
        What each block does, in running order, and the bytes of the workspace, which all blocks of
        a device share.
    """
    model, blocks = meta.model, meta.modules
    experts = max((param.num_experts for param in meta.layout.experts), default=1)
    batch, seq = _short_sequences(model, batch, seq)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    tracker = MemoryTracker([*known_tensors(model), ids], experts)
    workspace = PlannedWorkspace(workspace_cap, tracker.empty_uncounted)
    middle = {name for group in meta.groups for name in group[1:-1]}
    layers = [blocks[b.name] for b in meta.blocks if b.layer and b.name not in middle]
    with quiet(), ExitStack() as stack, tracker:
        for each in (
            fused_attention(),
            planned_for(card),
            planned(workspace),
            # A mask as an index (GLM-5's blocks of keys that are no padding) takes all.
            cast("Any", fx_config).patch(meta_nonzero_assume_all_nonzero=True),
            _even_counts(batch * seq * (top_k_of(meta.base) or 1)),
            *(patch.dict(vars(x), forward=_on_level(level, x.forward)) for x in layers),
        ):
            stack.enter_context(each)
        found = record_step(meta, tracker, partial(loss_of, model, ids), "meta")
    return found, workspace.nbytes


def _on_level(level: str, own: Any) -> Any:
    return lambda *args, **kwargs: levels.compute(level, own, args, kwargs)


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


def measure_step(
    step: StepModel,
    batch: int,
    seq: int,
    *,
    loss: Loss | None = None,
    slots: Callable[[], Sequence[Tensor]] = tuple,
) -> tuple[Activity, ...]:
    """Run one step of a real model; return what each block does, in running order.

    Gradients, random numbers, and the mode of modules stay as they were. `loss` computes the loss
    in place of the model; `slots` returns memory for experts that lie in host memory, which may go
    afterwards.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = step.base.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (batch, seq), generator=generator)
    device = step.trained[0].device

    def run(ids: Tensor) -> tuple[Activity, ...]:
        ids = ids.to(device)
        cuda = device.type == "cuda"
        known = [*known_tensors(step.model), ids, *slots()]
        tracker: Any = _Allocator(device) if cuda else MemoryTracker(known, grain=1)
        with ExitStack() as stack:
            stack.enter_context(_as_before(step.model, device))
            if not cuda:
                # What Dynamo sees first under such a mode, it would never compile.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(tracker)
            stack.enter_context(_holding(step))
            own = partial(_loss_of_batch, step.model, ids, loss)
            return record_step(step, tracker, own, device, once=loss is not None)

    if device.type == "cuda":
        run(ids)  # For what kernels and libraries allocate once
        return run(ids)
    # What a loop over experts allocates goes by the busiest: equal tokens have all in one.
    most = zip(run(ids), run(torch.zeros_like(ids)), strict=True)
    return tuple(Activity(a.name, *map(max, astuple(a)[1:], astuple(b)[1:])) for a, b in most)


@contextmanager
def _holding(step: StepModel) -> Iterator[None]:
    """Hold what layers are given, as layers do that are computed again.

    So it is alive in their backward whether they need it or not: masks and other arguments; and
    hidden states, but for those that a layer makes.
    """
    held: list[Tensor] = []

    def hold(layer: nn.Module, args: Any, kwargs: Any) -> None:
        first = not held  # of those that run: a tower's may not
        named = {key: value for key, value in kwargs.items() if first or key != "hidden_states"}
        held.extend(tensors_of((args if first else args[1:], named)))

    modules = step.modules
    with ExitStack() as hooks:
        for layer in (modules[block.name] for block in step.blocks if block.layer):
            hooks.enter_context(layer.register_forward_pre_hook(hold, with_kwargs=True))
        yield


def _loss_of_batch(model: Any, ids: Tensor, given: Loss | None) -> Tensor:
    if given is not None:
        found: Any = given(model, {"input_ids": ids, "labels": ids.clone()})
        if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return found
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"a tensor of shape {tuple(found.shape)}, requires_grad={found.requires_grad}"
        raise ConfigError(
            f"loss returned {what}; give a function of the model and a batch that returns one "
            "number with a gradient."
        )
    base = base_model(model)
    more = {}
    for name in ("forward", "_old_forward"):  # The second inside of accelerate's hook
        forward = vars(base).get(name)
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames:
            more = {"fused_lm_head": True}  # By which TRL's trainers ask for their loss in chunks
    try:
        return loss_of(model, ids, **more)
    except AttributeError as error:  # A model without embeddings of tokens, say
        raise ConfigError(
            f"fit_memory measures a step of token ids, on which {type(base).__name__} does not run "
            f"({first_line(error)}): give loss=, a function that runs it on other inputs."
        ) from error


@contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In this block, a model trains without gradients of before; then all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
