"""Watch one block's forward: which stacks are contracted along which side, what is chosen.

The block runs as a shadow (shadow.py): activations and small tensors are real numbers on the CPU,
so that routing, `nonzero` and `.item()` have answers; big weights are meta tensors. This mode sits
between the two. A view of a weight stays a meta view, whose strides tell rows from columns; an
operation that mixes a weight with an activation is run on meta for its shape and answered with
random numbers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten

# Position of the weight operand's contracted dimension in matrix products, for each operand slot.
# None: no matrix.
_PRODUCTS: dict[str, tuple[int, int]] = {
    # name: (index of the left operand, index of the right operand) among the positional arguments
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "addmv": (1, 2),
    "_grouped_mm": (0, 1),
    "grouped_mm_fallback": (0, 1),
    "matmul": (0, 1),
}
_CHOICES = {
    "topk",
    "argmax",
    "sort",
    "argsort",
    "softmax",
    "_softmax",
    "max",
    "kthvalue",
    "msort",
    "amax",
}
_PICKS = {"index", "index_select", "gather", "take"}
_SUMS = {"sum", "mean"}
# fmt: off
_NONLINEAR = {
    "silu", "gelu", "relu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softplus", "mish",
    "elu", "leaky_relu", "celu", "selu", "pow", "exp", "erf", "square", "log_sigmoid",
    "log_sigmoid_forward", "hardtanh", "abs", "sin", "silu_", "relu_", "sigmoid_", "tanh_",
    "_softmax", "softmax", "threshold", "rrelu", "glu",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product of an activation with (a slice of) a stack.

    Attributes:
        stack: Key of the stack.
        axis: Dimension of the whole stack that was summed over; None where its strides no longer
            tell.
        size: How many elements were summed over.
        others: Size of the slice's other matrix dimension (what came out).
        upstream: Keys of stacks that the activation comes from, each with whether something
            nonlinear lay between.
        chosen: Sizes of the dimensions along which something was chosen on the way to the
            activation.
        picked: Whether the activation's rows were picked by the router's scores.
    """

    stack: int
    axis: int | None
    size: int
    others: int
    upstream: frozenset[tuple[int, bool]]
    chosen: frozenset[int] = frozenset()
    picked: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One operation that ranks or normalizes input-dependent numbers along `size` of them."""

    size: int
    upstream: frozenset[tuple[int, bool]]


@dataclass(slots=True)
class Trace:
    """What one run showed.

    Attributes:
        contractions: Products of activations with stacks, in order.
        choices: What was ranked or normalized.
        applied: Keys of stacks whose slices were summed into one matrix that then met an activation
            in a product.
        completed: Whether the forward returned.
        error: What it raised.
    """

    contractions: list[Contraction] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    applied: set[int] = field(default_factory=set)
    completed: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What is known of a tensor: does it depend on the input, and which stacks did it pass.

    `scores`: it is a router's weight, or the scores computed from it, each expert's still apart.
    `picked`: its rows were picked by such scores. `merged`: stacks whose slices were summed to it.
    """

    from_input: bool = False
    passed: frozenset[tuple[int, bool]] = frozenset()
    chosen: frozenset[int] = frozenset()
    scores: bool = False
    picked: bool = False
    merged: frozenset[int] = frozenset()

    def join(self, other: _Mark) -> _Mark:
        return _Mark(
            self.from_input or other.from_input,
            self.passed | other.passed,
            self.chosen | other.chosen,
            self.scores or other.scores,
            self.picked or other.picked,
            self.merged | other.merged,
        )

    def bent(self) -> _Mark:
        return replace(self, passed=frozenset((key, True) for key, _ in self.passed))


@dataclass(frozen=True, slots=True)
class _Origin:
    """The stack that a weight comes from, and which of its dimensions each stride steps along."""

    stack: int
    axes: dict[int, int]

    def axis(self, tensor: torch.Tensor, dim: int) -> int | None:
        return self.axes.get(tensor.stride()[dim]) if tensor.shape[dim] > 1 else None


def _strides_of(tensor: torch.Tensor, axes: list[int | None]) -> dict[int, int]:
    dims = zip(tensor.shape, tensor.stride(), axes, strict=True)
    return {stride: axis for n, stride, axis in dims if n > 1 and stride > 0 and axis is not None}


class _Memory:
    """Marks for live tensors, by identity."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[Any, Any]] = {}

    def get(self, tensor: torch.Tensor) -> Any:
        entry = self._marks.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def set(self, tensor: torch.Tensor, mark: Any) -> None:
        key = id(tensor)
        self._marks[key] = (weakref.ref(tensor), mark)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(tree)[0] if isinstance(item, torch.Tensor)]


class BlockTrace(TorchDispatchMode):
    """Records contractions and choices while a shadow block runs.

    Args:
        stacks: The meta parameters that stand for the candidate stacks, by key.
        generator: Source of the random numbers that stand for activations.
    """

    def __init__(self, stacks: dict[int, torch.Tensor], generator: torch.Generator) -> None:
        super().__init__()
        self.trace = Trace()
        self._generator = generator
        self._of_stack = _Memory()
        self._marks = _Memory()
        for key, tensor in stacks.items():
            self._of_stack.set(tensor, _Origin(key, _strides_of(tensor, list(range(tensor.dim())))))

    def mark_input(self, tensor: torch.Tensor) -> None:
        self._marks.set(tensor, _Mark(from_input=True))

    def mark_router(self, tensor: torch.Tensor) -> None:
        self._marks.set(tensor, _Mark(scores=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = _tensors((args, kwargs))
        if not given or not all(t.is_meta for t in given):
            self._keep_on_cpu(func, kwargs, bool(given))
        weights = [t for t in given if t.is_meta]
        if not weights:
            out = func(*args, **kwargs)
            self._follow(name, func, args, given, out)
            return out
        if len(weights) == len(given):
            return self._weights_only(name, func, args, kwargs, weights)
        return self._mixed(name, func, args, kwargs, given, weights)

    @staticmethod
    def _keep_on_cpu(func: Any, kwargs: dict[str, Any], has_tensors: bool) -> None:
        """Code that asks for "the weight's device" means the device of the run."""
        device = kwargs.get("device")
        to_meta = device is not None and torch.device(device).type == "meta"
        if to_meta or (device is None and not has_tensors and "device" in str(func._schema)):
            kwargs["device"] = torch.device("cpu")

    # Weights alone: views, casts, slices. They stay meta.

    def _weights_only(
        self, name: str, func: Any, args: Any, kwargs: Any, weights: list[torch.Tensor]
    ) -> Any:
        if name == "_local_scalar_dense":
            return 1
        out = func(*args, **kwargs)
        for weight in weights:
            origin = self._of_stack.get(weight)
            if origin is not None:
                for tensor in _tensors(out):
                    self._of_stack.set(tensor, self._inherit(origin, weight, tensor))
                break
        return out

    @staticmethod
    def _inherit(origin: _Origin, source: torch.Tensor, result: torch.Tensor) -> _Origin:
        if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            return origin
        if result.shape == source.shape:
            axes = [origin.axis(source, dim) for dim in range(source.dim())]
            return _Origin(origin.stack, _strides_of(result, axes))
        return _Origin(origin.stack, {})

    # Activations alone: real numbers, followed from the input.

    def _joined(self, given: list[torch.Tensor]) -> _Mark:
        mark = _Mark()
        for tensor in given:
            found = self._marks.get(tensor)
            if found is not None:
                mark = mark.join(found)
        return mark

    def _follow(self, name: str, func: Any, args: Any, given: list[torch.Tensor], out: Any) -> None:
        mark = self._joined(given)
        if name in _NONLINEAR:
            mark = mark.bent()
        elif name in _PRODUCTS:
            mark = self._follow_product(name, args, mark)
        elif name in _SUMS:
            mark = replace(mark, scores=False)
        elif name in _PICKS:
            index = self._joined(_tensors(args[1:]))
            mark = replace(mark, picked=mark.picked or (index.from_input and index.scores))
        if mark.from_input and name in _CHOICES and args and isinstance(args[0], torch.Tensor):
            mark = replace(mark, chosen=mark.chosen | self._record_choice(args, mark))
        if mark.from_input or mark.passed or mark.scores:
            for tensor in _tensors(out):
                self._marks.set(tensor, mark)

    def _follow_product(self, name: str, args: Any, mark: _Mark) -> _Mark:
        """A product of two activations: it ends scores, and applies what was merged before."""
        slots = _PRODUCTS[name]
        if len(args) <= max(slots):
            return mark
        left, right = (self._marks.get(args[slot]) or _Mark() for slot in slots)
        for merged, other in ((left, right), (right, left)):
            if other.from_input:
                known = {stack for stack, _ in other.passed}
                self.trace.applied |= merged.merged - known
        fresh = any(side.scores and not side.from_input for side in (left, right))
        return replace(mark, scores=fresh, merged=frozenset())

    def _record_choice(self, args: Any, mark: _Mark) -> frozenset[int]:
        source: torch.Tensor = args[0]
        sizes = list(source.shape)
        dims = [
            a
            for a in args[1:]
            if isinstance(a, int) and not isinstance(a, bool) and -len(sizes) <= a < len(sizes)
        ]
        along = {sizes[d] for d in dims} or set(sizes[-1:])
        self.trace.choices.extend(Choice(size, mark.passed) for size in along)
        return frozenset(along)

    # A weight meets an activation.

    def _mixed(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> Any:
        if name in _PICKS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self._pick(name, args)
        if func._schema.is_mutable:
            return self._mutate(args, given)
        out = func(*self._to_meta(args), **self._to_meta(kwargs))
        mark = self._joined([t for t in given if not t.is_meta])
        stack = self._record_product(name, args, mark)
        if stack is not None:
            merged = {stack} if self.trace.contractions[-1].axis == 0 else set()
            passed = frozenset({(stack, False)}) | mark.passed
            mark = replace(mark, passed=passed, scores=False, merged=frozenset(merged))
        if name in _NONLINEAR:
            mark = mark.bent()

        def answer(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            real = self._real(item)
            self._marks.set(real, mark)
            return real

        return tree_map(answer, out)

    def _mutate(self, args: Any, given: list[torch.Tensor]) -> Any:
        target = args[0]
        mark = self._joined([t for t in given if not t.is_meta])
        if isinstance(target, torch.Tensor) and not target.is_meta:
            self._marks.set(target, mark)
        return target

    def _pick(self, name: str, args: Any) -> torch.Tensor:
        """Slices of a weight chosen by a real index: still a weight."""
        source: torch.Tensor = args[0]
        origin = self._of_stack.get(source)
        rest = 0
        if name == "index_select" and args[1] == 0:
            lead, rest = tuple(args[2].shape), 1
        elif name == "index":
            positions = [i for i in args[1] if i is not None]
            if len(positions) == 1 and args[1][0] is not None:
                index = positions[0]
                mask = index.dtype in (torch.bool, torch.uint8)
                lead, rest = ((int(index.sum()),), index.dim()) if mask else (tuple(index.shape), 1)
        if rest:
            out = torch.empty(lead + tuple(source.shape[rest:]), dtype=source.dtype, device="meta")
        elif name == "index":
            out = aten.index(source, [None if i is None else i.to("meta") for i in args[1]])
        else:
            out = torch.empty_like(args[-1], dtype=source.dtype, device="meta")
        if origin is not None:
            axes = (
                [None] * len(lead) + [origin.axis(source, d) for d in range(rest, source.dim())]
                if rest
                else []
            )
            self._of_stack.set(out, _Origin(origin.stack, _strides_of(out, axes) if rest else {}))
        return out

    def _record_product(self, name: str, args: Any, mark: _Mark) -> int | None:
        slots = _PRODUCTS.get(name)
        if slots is None or len(args) <= max(slots):
            return None
        for slot, side in zip(slots, (-1, -2), strict=True):
            weight = args[slot]
            origin = (
                self._of_stack.get(weight)
                if isinstance(weight, torch.Tensor) and weight.is_meta
                else None
            )
            if origin is None:
                continue
            flat = weight.dim() < 2
            dim = -1 if flat else side
            other = 1 if flat else weight.shape[-1 if side == -2 else -2]
            axis, size = origin.axis(weight, dim), weight.shape[dim]
            self.trace.contractions.append(
                Contraction(origin.stack, axis, size, other, mark.passed, mark.chosen, mark.picked)
            )
            return int(origin.stack)
        return None

    def _to_meta(self, tree: Any) -> Any:
        def move(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.is_meta:
                return item
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")

        moved = tree_map(move, tree)
        if isinstance(moved, dict) and "device" in moved:
            moved["device"] = torch.device("meta")
        return moved

    def _real(self, like: torch.Tensor) -> torch.Tensor:
        if like.dtype.is_floating_point:
            return torch.randn(like.shape, generator=self._generator).to(like.dtype)
        return torch.zeros(like.shape, dtype=like.dtype)
