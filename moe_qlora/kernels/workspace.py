"""One buffer for dequantized weights, shared by all layers of a device.

A dequantized weight lives between its decoding and its grouped matmul, so that all layers can use
one buffer. It is kept between calls, since a block of this size does not come back from the
allocator in one piece. On other streams than the default one nothing is kept: there CUDA graphs are
recorded, and warmed up, in memory that is theirs.

Under gradient checkpointing a layer's backward follows its recomputation at once. What was decoded
last is therefore remembered by its owner, and not decoded again where it is still there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from .limits import WORKSPACE_PART


@dataclass
class _Slot:
    """One buffer."""

    buffer: Tensor | None = None
    owner: Hashable = None  # What it holds now; compared, never looked into
    # Tensors that `owner` names by address: held, so that no other takes their place
    alive: tuple[Tensor, ...] = field(default=(), repr=False)
    # The buffer as tensors were asked for: making one takes the host 5 us
    views: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)


_slots: dict[tuple[torch.device, str], _Slot] = {}
_cap: int | None = None
_recording = False


def set_workspace_cap(nbytes: int | None) -> None:
    """Bound the memory that experts' weights are dequantized into on a GPU.

    A weight over the bound is dequantized in slices, which costs time. Buffers that are held now
    are given back to the allocator.

    Args:
        nbytes: Bytes of one piece; at least one slice of 64 features is dequantized at a time.
            None is an eighth of the device's memory, as before the first call.
    """
    global _cap
    _cap = None if nbytes is None else int(nbytes)
    release_workspace()


@cache
def _default(device: torch.device) -> int:
    if device.type != "cuda":
        return 4 << 30
    return int(torch.cuda.get_device_properties(device).total_memory) // WORKSPACE_PART


def workspace_cap(device: torch.device) -> int:
    """Return the bound in bytes on this device."""
    return _default(device) if _cap is None else _cap


def release_workspace() -> None:
    """Give all buffers back to the allocator."""
    _slots.clear()


def held_bytes() -> int:
    """Return the bytes of all buffers."""
    return sum(slot.buffer.nbytes for slot in _slots.values() if slot.buffer is not None)


def _is_kept(device: torch.device) -> bool:
    """Whether buffers are kept for what runs now: on the default stream, or within `recorded`."""
    if device.type != "cuda" or _recording:
        return True
    return torch._C._cuda_getCurrentRawStream(device.index) == 0


@contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Let what is recorded for a CUDA graph use the kept buffers.

    The graph is to be replayed on the default stream, what it writes to be held (`buffers`), and
    `forget` to be called after each replay.
    """
    global _recording
    forget(device)
    _recording = True
    try:
        yield
    finally:
        _recording = False
        forget(device)


def buffers(device: torch.device) -> tuple[Tensor, ...]:
    """Return the buffers that are kept on a device."""
    kept = (slot.buffer for key, slot in _slots.items() if key[0] == device)
    return tuple(buffer for buffer in kept if buffer is not None)


def forget(device: torch.device) -> None:
    """Remember no longer what the buffers hold: a graph has written to them."""
    for key, slot in _slots.items():
        if key[0] == device:
            slot.owner, slot.alive = None, ()


def holds(name: str, device: torch.device, owner: Hashable) -> bool:
    """Whether the buffer of this name still holds what `owner` names."""
    slot = _slots.get((device, name))
    return owner is not None and slot is not None and slot.owner == owner and _is_kept(device)


def take(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    owner: Hashable = None,
    alive: tuple[Tensor, ...] = (),
) -> tuple[Tensor, bool]:
    """Return a contiguous tensor on the shared buffer, valid until the next call with this name.

    Where no buffer is kept it is a tensor of its own.

    The second result says whether it already holds what `owner` names; None is never remembered.
    `alive` are tensors to hold as long as `owner` is remembered.
    """
    if not _is_kept(device):
        return torch.empty(shape, dtype=dtype, device=device), False
    slot = _slots.setdefault((device, name), _Slot())
    tensor = slot.views.get((shape, dtype))
    if tensor is None:
        nbytes = math.prod(shape) * dtype.itemsize
        if slot.buffer is None or slot.buffer.numel() < nbytes:
            slot.buffer = slot.owner = None
            slot.alive = ()
            slot.views.clear()
            slot.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        tensor = slot.views[shape, dtype] = slot.buffer[:nbytes].view(dtype).view(shape)
    held = owner is not None and slot.owner == owner
    slot.owner, slot.alive = owner, alive
    return tensor, held
