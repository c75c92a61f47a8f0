"""Trace one block's forward: which weights are contracted along which side, what is ranked.

The block runs as a copy (dry_run.py): activations and small tensors are real numbers on the CPU, so
that routing, `nonzero` and `.item()` have answers; big weights are meta tensors. This mode sits
between the two:

    weights alone          stay on meta; the strides of a view still tell rows from columns
    activations alone      are computed; their origins are followed from tensor to tensor
    weight and activation  run on meta for the shape of the result, which is filled with random
                           numbers; a matrix product is recorded as a Contraction
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

# Names of operations. For a product, the positions of its two operands.
# fmt: off
_PRODUCTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "matmul", "_grouped_mm", "grouped_mm_fallback"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
}
_RANKINGS = {
    "topk", "argmax", "sort", "argsort", "softmax", "_softmax", "max", "kthvalue", "msort", "amax",
}
_PICKS = {"index", "index_select", "gather", "take"}
_SUMS = {"sum", "mean"}
_WEIGHS = {*_PRODUCTS, *_PICKS, "mul", "mul_", "where", "masked_fill", "masked_fill_"}
_NONLINEAR = {
    "silu", "gelu", "relu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "elu", "leaky_relu", "celu", "selu", "pow", "exp", "erf", "square", "log_sigmoid",
    "log_sigmoid_forward", "hardtanh", "abs", "sin", "silu_", "relu_", "sigmoid_", "tanh_",
    "_softmax", "softmax", "threshold", "rrelu", "glu",
}
# fmt: on

_LEAVES = (int, float, str, type(None), torch.dtype, torch.device)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Keys of weights that a value was computed from; True if something nonlinear lies between.
Upstream = frozenset[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product of an activation with a weight (by its key) or with a slice of it."""

    weight: int
    axis: int | None  # summed dimension of the whole weight; None: unknown by strides
    size: int  # elements summed over
    others: int  # size of the slice's other matrix dimension
    upstream: Upstream  # weights that the activation was computed from
    ranked: frozenset[int] = frozenset()  # sizes along which something was ranked for either
    picked: bool = False  # its rows were picked by the router's scores


@dataclass(frozen=True, slots=True)
class Ranking:
    """One operation that ranks or normalizes input-dependent numbers along `size` of them."""

    size: int
    upstream: Upstream


@dataclass(slots=True)
class Trace:
    """The result of one run: completed or the error, and the recorded operations.

    `applied` are the keys of weights whose slices were summed into one matrix that was then
    multiplied by an activation; `chosen` are sizes along which something was ranked that then
    weighed or picked what weights gave, or was read by Python.
    """

    contractions: list[Contraction] = field(default_factory=list)
    rankings: list[Ranking] = field(default_factory=list)
    applied: set[int] = field(default_factory=set)
    chosen: set[int] = field(default_factory=set)
    completed: bool = False
    error: str = ""

    def feeds(self) -> dict[int, dict[int, bool]]:
        """Return which weights feed each weight, and whether something nonlinear lies between."""
        feeds: dict[int, dict[int, bool]] = {}
        for contraction in self.contractions:
            upstream, weight = contraction.upstream, contraction.weight
            sources = {key: (key, True) in upstream for key, _ in upstream if key != weight}
            if sources:
                feeds.setdefault(weight, sources)
        return feeds


class _History(NamedTuple):
    from_input: bool = False  # it depends on the block's input
    upstream: Upstream = frozenset()
    ranked: frozenset[int] = frozenset()  # sizes along which something was ranked on the way
    scores: bool = False  # a router's weight, or scores computed from it, not summed over experts
    picked: bool = False  # its rows were picked by such scores
    merged: frozenset[int] = frozenset()  # weights whose slices were summed to it

    def join(self, other: _History) -> _History:
        fields: Any = zip(self, other, strict=True)  # flags and sets
        return _History(*(first | second for first, second in fields))

    def after_nonlinearity(self) -> _History:
        return self._replace(upstream=frozenset((key, True) for key, _ in self.upstream))


@dataclass(frozen=True, slots=True)
class _Origin:
    """The weight that a meta tensor comes from, and the dimension that each stride steps along."""

    weight: int
    axes: dict[int, int]
    ranked: frozenset[int] = frozenset()  # sizes along which the index that picked it was ranked

    def axis(self, tensor: torch.Tensor, dim: int) -> int | None:
        return self.axes.get(tensor.stride()[dim]) if tensor.shape[dim] > 1 else None


def _axes_by_stride(tensor: torch.Tensor, axes: list[int | None]) -> dict[int, int]:
    dims = zip(tensor.shape, tensor.stride(), axes, strict=True)
    return {stride: axis for n, stride, axis in dims if n > 1 and stride > 0 and axis is not None}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, dicts and the like."""
    tensors: list[torch.Tensor] = []
    for item in tree if type(tree) in (list, tuple) else (tree,):
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif type(item) in (list, tuple):
            tensors += tensors_of(item)
        elif not isinstance(item, _LEAVES):  # Other containers are rare, and slow to flatten.
            tensors += (leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, torch.Tensor))
    return tensors


class PythonReads(TorchFunctionMode):
    """Records rankings that Python reads as a list, which is no operation of torch."""

    def __init__(self, watch: BlockTrace) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and args[0].dtype in _INTEGERS:
            self._watch.trace.chosen |= self._watch.history(args[0]).ranked
        return func(*args, **(kwargs or {}))


class BlockTrace(TorchDispatchMode):
    """The mode that records contractions and rankings while the copy of a block runs.

    `weights` are the candidates' meta parameters; `generator` gives activations' numbers.
    """

    def __init__(self, weights: Sequence[torch.Tensor], generator: torch.Generator) -> None:
        super().__init__()
        self.trace = Trace()
        self._generator = generator
        self._origins = WeakIdKeyDictionary()
        self._histories = WeakIdKeyDictionary()
        for key, weight in enumerate(weights):
            axes = _axes_by_stride(weight, list(range(weight.dim())))
            self._origins[weight] = _Origin(key, axes)

    def follow(self, inputs: Any, routers: Sequence[torch.Tensor]) -> None:
        """Follow what is computed from the block's inputs, and from weights of routers."""
        for tensor in tensors_of(inputs):
            self._histories[tensor] = _History(from_input=True)
        for router in routers:
            self._histories[router] = _History(scores=True)

    def history(self, tensor: torch.Tensor) -> _History:
        """Return the history of an activation."""
        history: _History = self._histories.get(tensor, _History())
        return history

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = tensors_of([*args, *kwargs.values()])
        weights = [t for t in tensors if t.is_meta]
        activations = [t for t in tensors if not t.is_meta]
        if activations or not weights:
            # Code that asks for "the weight's device" means the device of the run.
            device = kwargs.get("device")
            to_meta = device is not None and torch.device(device).type == "meta"
            if to_meta or (device is None and not tensors and "device" in str(func._schema)):
                kwargs["device"] = torch.device("cpu")
        if not weights:
            out = func(*args, **kwargs)
            self._follow(name, args, activations, out)
            return out
        if not activations:
            return self._weights_only(name, func, args, kwargs, weights)
        return self._mixed(name, func, args, kwargs, activations)

    # Weights alone: views, casts and slices, which stay on meta.

    def _weights_only(
        self, name: str, func: Any, args: Any, kwargs: Any, weights: list[torch.Tensor]
    ) -> Any:
        if name == "_local_scalar_dense":
            return 1
        out = func(*args, **kwargs)
        source = next((weight for weight in weights if weight in self._origins), None)
        if source is None:
            return out
        for tensor in tensors_of(out):
            origin = self._origins[source]
            if tensor.untyped_storage()._cdata != source.untyped_storage()._cdata:
                axes = [origin.axis(source, dim) for dim in range(source.dim())]
                same = tensor.shape == source.shape
                origin = replace(origin, axes=_axes_by_stride(tensor, axes) if same else {})
            self._origins[tensor] = origin
        return out

    # Activations alone: real numbers, followed from the input.

    def _joined(self, tensors: list[torch.Tensor]) -> _History:
        return reduce(_History.join, map(self.history, tensors), _History())

    def _follow(self, name: str, args: Any, activations: list[torch.Tensor], out: Any) -> None:
        history = self._joined(activations)
        if name in _WEIGHS:
            # Rankings that scale or select results of weights, and come from other sources.
            for ranked, product in itertools.permutations(map(self.history, activations), 2):
                weights = {key for key, _ in product.upstream}
                if weights and weights.isdisjoint(key for key, _ in ranked.upstream):
                    self.trace.chosen |= ranked.ranked
        elif name == "_local_scalar_dense" and activations[0].dtype in _INTEGERS:
            self.trace.chosen |= history.ranked
        if name in _NONLINEAR:
            history = history.after_nonlinearity()
        elif name in _PRODUCTS:
            history = self._follow_product(name, args, history)
        elif name in _SUMS:
            history = history._replace(scores=False)
        elif name in _PICKS:
            index = self._joined(tensors_of(args[1:]))
            by_scores = index.from_input and index.scores
            history = history._replace(picked=history.picked or by_scores)
        elif name == "eq" and history.ranked:  # the rows whose best choice is this one
            history = history._replace(picked=True)
        if history.from_input and name in _RANKINGS and args and isinstance(args[0], torch.Tensor):
            sizes = list(args[0].shape)
            dims = [a for a in args[1:] if type(a) is int and -len(sizes) <= a < len(sizes)]
            along = frozenset([sizes[dim] for dim in dims] or sizes[-1:])
            self.trace.rankings.extend(Ranking(size, history.upstream) for size in along)
            history = history._replace(ranked=history.ranked | along)
        if history.from_input or history.upstream or history.scores:
            for tensor in tensors_of(out):
                self._histories[tensor] = history

    def _follow_product(self, name: str, args: Any, history: _History) -> _History:
        """Follow a product of two activations: scores end, and merged weights count as applied."""
        slots = _PRODUCTS[name]
        if len(args) <= max(slots):
            return history
        left, right = (self.history(args[slot]) for slot in slots)
        for merged, other in ((left, right), (right, left)):
            if other.from_input:
                self.trace.applied |= merged.merged - {key for key, _ in other.upstream}
        fresh = any(side.scores and not side.from_input for side in (left, right))
        return history._replace(scores=fresh, merged=frozenset())

    # A weight meets an activation.

    def _mixed(
        self, name: str, func: Any, args: Any, kwargs: Any, activations: list[torch.Tensor]
    ) -> Any:
        if name in _PICKS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self._pick(name, func, args)
        history = self._joined(activations)
        if func._schema.is_mutable:
            target = args[0]
            if isinstance(target, torch.Tensor) and not target.is_meta:
                self._histories[target] = history
            return target
        out = func(*_to_meta(args), **_to_meta(kwargs))
        contraction = self._record_product(name, args, history)
        if contraction is not None:
            key = contraction.weight
            history = history._replace(
                upstream=history.upstream | {(key, False)},
                scores=False,
                merged=frozenset({key} if contraction.axis == 0 else ()),
            )
        if name in _NONLINEAR:
            history = history.after_nonlinearity()

        def answer(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            numbers = torch.zeros(item.shape, dtype=item.dtype)
            if item.dtype.is_floating_point:
                numbers.copy_(torch.randn(item.shape, generator=self._generator))
            self._histories[numbers] = history
            return numbers

        return tree_map(answer, out)

    def _pick(self, name: str, func: Any, args: Any) -> torch.Tensor:
        source, *where = args
        rest = 0  # first dimension that indexing leaves unchanged, if known
        if name == "index_select":
            rest = int(where[0] == 0)
        elif name == "index":
            mask = where[0][0]
            rest = int(mask is not None and all(index is None for index in where[0][1:]))
            if rest and mask.dtype in (torch.bool, torch.uint8):
                rest, where = mask.dim(), [mask.nonzero(as_tuple=True)]
        out: torch.Tensor = func(source, *_to_meta(where))
        origin = self._origins.get(source)
        if origin is not None:
            lead = out.dim() - source.dim() + rest
            tail = [origin.axis(source, dim) for dim in range(rest, source.dim())] if rest else []
            axes = _axes_by_stride(out, [None] * lead + tail) if rest else {}
            index = self._joined([t for t in tensors_of(args[1:]) if not t.is_meta])
            self._origins[out] = _Origin(origin.weight, axes, origin.ranked | index.ranked)
        return out

    def _record_product(self, name: str, args: Any, history: _History) -> Contraction | None:
        slots = _PRODUCTS.get(name)
        if slots is None or len(args) <= max(slots):
            return None
        for slot, side in zip(slots, (-1, -2), strict=True):
            weight = args[slot]
            origin = self._origins.get(weight) if isinstance(weight, torch.Tensor) else None
            if origin is None:
                continue
            vector = weight.dim() < 2
            dim = -1 if vector else side
            contraction = Contraction(
                origin.weight,
                origin.axis(weight, dim),
                weight.shape[dim],
                1 if vector else weight.shape[-3 - side],
                history.upstream,
                history.ranked | origin.ranked,
                history.picked,
            )
            self.trace.contractions.append(contraction)
            return contraction
        return None


def _to_meta(tree: Any) -> Any:
    def move(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.is_meta:
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")

    moved = tree_map(move, tree)
    if isinstance(moved, dict) and "device" in moved:
        moved["device"] = torch.device("meta")
    return moved
