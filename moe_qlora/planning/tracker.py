"""Counts the bytes of tensors: those on meta as a GPU would hold them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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
            out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            self._count(tensor)
        if func._schema.name in _INSIDE and out.is_meta:
            self._count(torch.empty_like(out, dtype=_INSIDE[func._schema.name]))
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
