"""Counts the bytes that tensors on the meta device would hold on a GPU, in loops too.

transformers computes a gated delta rule or a selective scan chunk by chunk, or token by token,
where no kernel for it is installed. On meta each turn of such a loop takes its time and tells
nothing new: what it allocates and saves grows by the same bytes for each `_UNIT` tokens. So the
function itself runs on meta at three short lengths, and a stand-in takes the bytes that follow for
the length that is asked for. Where the three lie on no line, the function itself runs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..kernels.limits import cdiv

GRAIN = 512
"""The caching allocator's smallest step, in bytes."""

_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
SEQUENCE = {
    "torch_chunk_gated_delta_rule": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "chunk_kimi_delta_attention": {"query": 1, "key": 1, "value": 1, "g": 1, "beta": 1},
    "mamba_selective_scan": {"hidden_states": 2, "dt": 2, "B": 2, "C": 2, "z": 2},
}
"""The functions that loop, by name, with the dimension of the sequence in each argument."""

_UNIT = 256
"""Tokens by which bytes grow evenly: whole chunks, and tensors in whole steps of the allocator."""

_SHORT = 4 * _UNIT  # up to which the function itself runs

_lock, _patched = RLock(), dict[tuple[str, str], tuple[int, Any]]()
_MOST_KNOWN = 1 << 14
_made = dict[Any, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]()
_NO_TENSORS = (int, float, str, type(None), torch.dtype, torch.device)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, dicts and the like."""
    tensors: list[Tensor] = []
    for item in tree if type(tree) in (list, tuple) else (tree,):
        if isinstance(item, Tensor):
            tensors.append(item)
        elif type(item) in (list, tuple):
            tensors += tensors_of(item)
        elif not isinstance(item, _NO_TENSORS):  # Other containers are rare, and slow to flatten.
            tensors += (leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, Tensor))
    return tensors


class MemoryTracker(TorchDispatchMode):
    """A count of the bytes of meta storages that are alive, and of the most since `mark`.

    The storages of `known`, weights and inputs, are not counted. The model chooses among `experts`.
    """

    grain = GRAIN

    def __init__(self, known: Sequence[Tensor], experts: int = 1) -> None:
        super().__init__()
        self.experts = experts
        self.live = 0
        self.peak = 0
        self._uncounted = False
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {storage._cdata for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # What models ask of contents is whether there is padding, packing or overflow.
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            # Places in a mask: which experts have tokens (all), or which tokens are of one.
            count = args[0].numel() // (1 if args[0].numel() <= self.experts else self.experts)
            out = torch.empty((count, args[0].dim()), dtype=torch.long, device="meta")
        else:
            if func is _SOFTMAX_BACKWARD:
                # CUDA's first multiplies the gradient by the output, into a tensor of that size.
                product = torch.empty_like(args[0])
                self._count(product)
            out = self._run(func, args, kwargs or {})
        return self.counted(out)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, whose rule on meta is slow Python, once for arguments that are alike."""
        if not _makes_one(func):
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _described((*args, *kwargs.items()))
            known = _made.get(key)
        except TypeError:  # of another device, or an argument that cannot be a key
            return func(*args, **kwargs)
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if type(out) is Tensor and out.is_meta and out.untyped_storage()._cdata not in self._seen:
            if len(_made) == _MOST_KNOWN:
                _made.clear()
            if out.untyped_storage().nbytes() == out.nbytes:
                _made[key] = tuple(out.shape), out.stride(), out.dtype
        return out

    def counted(self, out: Any) -> Any:
        """Count the tensors that an operation returns, and return them."""
        for tensor in tensors_of(out):
            self._count(tensor)
        return out

    def empty_uncounted(self, nbytes: int) -> Tensor:
        """Return a tensor of bytes on meta that is not counted, nor are its views."""
        self._uncounted = True
        try:
            return _bytes(nbytes)
        finally:
            self._uncounted = False

    def mark(self) -> int:
        """Start a new section, and return the most that was alive in the one before."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        if self._uncounted:
            self._known.append(storage)
            self._seen.add(key)
            return
        size = cdiv(storage.nbytes(), self.grain) * self.grain
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@cache
def _makes_one(func: Any) -> bool:
    """Whether an operator of torch's makes one new tensor, and changes none."""
    schema = func._schema
    alone = len(schema.returns) == 1 and schema.returns[0].alias_info is None
    return func.namespace == "aten" and alone and not schema.is_mutable


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value


class _Spec(NamedTuple):
    """One tensor argument, at any length of the sequence."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    dim: int | None  # Of the sequence


class _Sizes(NamedTuple):
    """Bytes that one call takes beyond its inputs."""

    saved: int  # From forward to backward, without the output
    saving: int  # The most in forward, output included, where backward's tensors are saved
    discarding: int  # The same under checkpointing, where they are not
    backward: int  # The most in backward beyond what is saved, the output's gradient included


class _Call(NamedTuple):
    """The memory and the output of one call at one length."""

    sizes: _Sizes
    saved: tuple[str, ...]  # Inputs that backward needs
    shape: tuple[int, ...]  # Of the output
    stride: tuple[int, ...]
    dtype: torch.dtype
    single: bool  # Whether the output comes alone, and not as the first of a tuple


@contextmanager
def scans_by_size(model: nn.Module) -> Iterator[None]:
    """In this block, the loops of a model's own modules take bytes and no time on meta.

    Tensors of other devices go through the functions as ever.
    """
    homes = {type(module).__module__ for module in model.modules()}
    found = [
        (home, name) for home in homes for name in SEQUENCE if hasattr(sys.modules[home], name)
    ]
    with _lock:
        for home, name in found:
            count, own = _patched.get((home, name), (0, getattr(sys.modules[home], name)))
            _patched[home, name] = (count + 1, own)
            if not count:
                setattr(sys.modules[home], name, _stand_in(own, SEQUENCE[name]))
    try:
        yield
    finally:
        with _lock:
            for home, name in found:
                count, own = _patched.pop((home, name))
                if count > 1:
                    _patched[home, name] = (count - 1, own)
                else:
                    setattr(sys.modules[home], name, own)


def _stand_in(own: Callable[..., Any], dims: Mapping[str, int]) -> Callable[..., Any]:
    signature, lead = inspect.signature(own), next(iter(dims))

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        first = given[lead]
        length = first.shape[dims[lead]]
        if not first.is_meta or length <= _SHORT:
            return own(*args, **kwargs)
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        specs = tuple(
            _Spec(name, tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad, dims.get(name))
            for name, t in tensors.items()
        )
        others = tuple((name, value) for name, value in given.items() if name not in tensors)
        made = _at_length(own, specs, others, length)
        if made is None:
            return own(*args, **kwargs)
        out = _Scan.apply(made, _saves(first), tuple(tensors), *tensors.values())
        return out if made.single else (out, None)

    return call


class _Scan(torch.autograd.Function):
    """Returns the output of a call, and allocates as it does in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, saves: bool, names: Any, *inputs: Tensor) -> Tensor:
        sizes, ctx.inputs = call.sizes, [_like(tensor) for tensor in inputs]
        ctx.working = sizes.backward
        # Under checkpointing nothing stays of a first forward: its tensors need a shape alone.
        buffer = _bytes(sizes.saved) if saves else _bytes(1).expand(sizes.saved)
        out = torch.empty_strided(call.shape, call.stride, dtype=call.dtype, device="meta")
        live = _held(out) + (sizes.saved if saves else GRAIN)
        working = _bytes(max((sizes.saving if saves else sizes.discarding) - live, 0))
        del working
        saved = (x for name, x in zip(names, inputs, strict=True) if name in call.saved)
        ctx.save_for_backward(buffer, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        held = ctx.saved_tensors
        working = _bytes(max(ctx.working - _held(grad), 0))
        del working, held
        grads = [
            make() if needed else None
            for make, needed in zip(ctx.inputs, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *grads


class _End(torch.autograd.Function):
    """Takes the output of a call; its gradient is freed as soon as it is read, as in a model."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.make = _like(out)
        return out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.make()


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def _saves(x: Tensor) -> bool:
    """True if a tensor saved now stays for backward, false under checkpointing."""
    saved = _bytes(0)
    alive = ref(saved.untyped_storage())
    out = _Probe.apply(x, saved)  # which holds what is saved
    del saved
    return alive() is not None or not out.requires_grad


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    shape, dtype = tensor.shape, tensor.dtype
    return lambda: torch.empty(shape, dtype=dtype, device="meta")


def _held(tensor: Tensor) -> int:
    return cdiv(tensor.untyped_storage().nbytes(), GRAIN) * GRAIN


def _bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def _at_length(own: Any, specs: tuple[_Spec, ...], others: Any, length: int) -> _Call | None:
    """Return what a call takes at a length, from shorter ones; None where these are on no line."""
    rest = length % _UNIT
    try:
        calls = [_measured(own, specs, others, length, n * _UNIT + rest) for n in (2, 3, 4)]
    except TypeError:  # an argument that cannot be a key
        return None
    first, _, third = calls
    turns = length // _UNIT - 4

    def extended(*values: int) -> int:
        return values[2] + turns * (values[2] - values[1])

    every = [(*call.sizes, *call.shape, *call.stride) for call in calls]
    if any(b - a != c - b for a, b, c in zip(*every, strict=True)) or first.saved != third.saved:
        return None
    reached = [extended(*values) for values in zip(*every, strict=True)]
    count, dims = len(third.sizes), len(third.shape)
    shape, stride = reached[count : count + dims], reached[count + dims :]
    return third._replace(sizes=_Sizes(*reached[:count]), shape=tuple(shape), stride=tuple(stride))


@cache
def _measured(own: Any, specs: tuple[_Spec, ...], others: Any, length: int, short: int) -> _Call:
    # A thread has no modes and hooks of the step around it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, own, specs, others, length, short).result()


def _measure(own: Any, specs: tuple[_Spec, ...], others: Any, length: int, short: int) -> _Call:
    inputs = {spec.name: _input(spec, length, short) for spec in specs}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in inputs.items()}
    saved: dict[str, None] = {}

    def pack(tensor: Tensor) -> Tensor:
        name = names.get(tensor.untyped_storage()._cdata)
        if name is not None:
            saved[name] = None
        return tensor

    def run() -> tuple[Tensor, bool]:
        made = own(**inputs, **dict(others))
        out, *more = (made,) if isinstance(made, Tensor) else made
        if any(each is not None for each in more):
            raise TypeError(f"{own.__name__} gives out more than one tensor")
        return out, isinstance(made, Tensor)

    discarding = MemoryTracker([*inputs.values()])
    shapes_alone = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda none: none)
    with discarding, shapes_alone:
        run()
    tracker = MemoryTracker([*inputs.values()])
    with tracker, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, single = run()
        saving = tracker.peak
        shape, stride, dtype = tuple(out.shape), tuple(out.stride()), out.dtype
        end = _End.apply(out)
        del out
        tracker.mark()
        held = tracker.live
        end.backward(end)
        backward = tracker.mark() - held
    sizes = _Sizes(held, saving, discarding.peak, max(backward, 0))
    return _Call(sizes, tuple(saved), shape, stride, dtype, single)


def _input(spec: _Spec, length: int, short: int) -> Tensor:
    shape, stride = list(spec.shape), list(spec.stride)
    if spec.dim is not None:
        shape[spec.dim] = short
        whole = spec.stride[spec.dim] * length
        stride = [each * short // length if each >= whole else each for each in stride]
    tensor = torch.empty_strided(shape, stride, dtype=spec.dtype, device="meta")
    return tensor.requires_grad_(spec.requires_grad)
