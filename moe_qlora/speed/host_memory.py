"""Host memory that a CUDA device copies from beside its kernels."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..layout import human_bytes
from .slots import Copier


class HostMemory:
    """Zeroed host memory, freed with the last of its tensors."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._map, self.nbytes = _Map.anonymous(nbytes), nbytes
        self.lock(device)

    def tensor(self, first: int, nbytes: int) -> Tensor:
        """Return a part as uint8 `(nbytes,)`, with a storage of its own: none copies the whole."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=first)

    def put(self, tensor: Tensor, first: int) -> Tensor:
        """Copy a tensor to its place, from this byte on, and return the copy."""
        there = self.tensor(first, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if there.data_ptr() != tensor.data_ptr():
            there.copy_(tensor)
        return there

    def fill(self, to: Tensor, copier: Copier, after: Iterable[Any]) -> Any:
        """Copy all of it once all events of `after` have come; return the event that it is done."""
        return copier.copy(to, self.tensor(0, self.nbytes), after)

    def lock(self, device: torch.device) -> None:
        """Page-lock the memory, if the device is CUDA, so that copies run beside kernels."""
        if device.type != "cuda" or self._map.locked_at:
            return
        address, nbytes = self.tensor(0, 1).data_ptr(), len(self._map)
        with torch.cuda.device(device):
            portable = 1  # cudaHostRegisterPortable: for all devices
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, portable))
            if error == 0:
                self._map.locked_at = address
                return
            with suppress(RuntimeError):  # The next launch would raise what CUDA remembers
                torch.zeros(1, device=device)
        raise ConfigError(
            f"offload_experts: {human_bytes(nbytes)} of host memory for a layer's experts could "
            f"not be page-locked (CUDA error {error}): free host memory, raise the limit "
            "(ulimit -l), or give fewer layers."
        )


class _Map(mmap.mmap):
    """Anonymous memory, unlocked before it is freed."""

    locked_at: int = 0  # The address that CUDA has page-locked

    @classmethod
    def anonymous(cls, nbytes: int) -> _Map:
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
        return cls(-1, nbytes, **flags)

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():
            torch.cuda.synchronize()  # A copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)
