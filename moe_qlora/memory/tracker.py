"""A count of the bytes that tensors on the meta device would hold on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..detection.trace import tensors_of
from ..kernels.limits import cdiv

GRAIN = 512
"""The caching allocator's smallest step, in bytes."""

_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default


class MemoryTracker(TorchDispatchMode):
    """A count of the bytes of meta storages that are alive, and of the most since `mark`.

    The storages of `known`, weights and inputs, are not counted. The model chooses among `experts`.
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
            # Places in a mask: which experts have tokens (all), or which tokens are of one.
            count = args[0].numel() // (1 if args[0].numel() <= self.experts else self.experts)
            out = torch.empty((count, args[0].dim()), dtype=torch.long, device="meta")
        else:
            if func is _SOFTMAX_BACKWARD:
                # CUDA's first multiplies the gradient by the output, into a tensor of that size.
                product = torch.empty_like(args[0])
                self._count(product)
            out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            self._count(tensor)
        return out

    def mark(self) -> int:
        """Start a new section, and return the most that was alive in the one before."""
        peak, self.peak = self.peak, self.live
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = cdiv(storage.nbytes(), GRAIN) * GRAIN
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size).atexit = False

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
