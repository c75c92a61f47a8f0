"""Counts the bytes of tensors: those on meta as a GPU would hold them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels.limits import cdiv

GRAIN = 512
"""The caching allocator's smallest step, in bytes."""

_INSIDE: dict[str, torch.dtype | None] = {
    # CUDA's first multiplies the gradient by the output.
    "aten::_softmax_backward_data": None,
    # The sums of products, before they are scaled.
    "bitsandbytes::int8_scaled_mm": torch.int32,
}
"""Operators that allocate a tensor of their output's shape inside, and its dtype if another."""

_MOST_KNOWN = 1 << 16
_made = dict[Any, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]()


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, dicts and the like."""
    leaves = [tree] if isinstance(tree, Tensor) else tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class MemoryTracker(TorchDispatchMode):
    """A count of the bytes of storages that are alive, and of the most since `mark`.

    The storages of `known`, weights and inputs, are not counted. The model chooses among `experts`.
    """

    def __init__(self, known: Sequence[Tensor], experts: int = 1, grain: int = GRAIN) -> None:
        super().__init__()
        self.experts, self.grain = experts, grain
        self.live = 0
        self.peak = 0
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
            out = self._run(func, args, kwargs or {})
        for tensor in tensors_of(out):
            self._count(tensor)
        if func._schema.name in _INSIDE and out.is_meta:
            self._count(torch.empty_like(out, dtype=_INSIDE[func._schema.name]))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, whose rule on meta is slow Python, once for arguments that are alike."""
        try:
            key = (func, _described((*args, *kwargs.items()))) if _makes_one(func) else None
            known = _made.get(key)
        except TypeError:  # of another device, or an argument that cannot be a key
            key = known = None
        if known is not None:
            shape, stride, dtype = known
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if key is not None and out.is_meta and len(_made) < _MOST_KNOWN:
            storage = out.untyped_storage()
            if storage._cdata not in self._seen and storage.nbytes() == out.nbytes:
                _made[key] = tuple(out.shape), out.stride(), out.dtype
        return out

    def empty_uncounted(self, nbytes: int) -> Tensor:
        """Return a tensor of bytes on meta that is not counted, nor are its views."""
        self._uncounted = True
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
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
    """Whether an operator makes one new tensor, of a dtype that its arguments say."""
    returns, named = func._schema.returns, func.namespace in ("aten", "bitsandbytes")
    alone = len(returns) == 1 and returns[0].alias_info is None and not func._schema.is_mutable
    return named and alone and str(returns[0].type) == "Tensor"


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value
