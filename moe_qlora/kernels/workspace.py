"""One buffer for dequantized weights, shared by all layers of a device.

A dequantized weight lives from its decoding to its grouped matmul, so all layers can use one
buffer. The buffer persists between calls, since the allocator may not have a block of this size in
one piece again. On other streams than the default one it is not used: there CUDA graphs are
recorded, and warmed up, in memory of their own.

Under gradient checkpointing a layer's backward follows its recomputation at once. The buffer
therefore records which weight was decoded last, and that weight is not decoded again.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .limits import WORKSPACE_PART


class _Slot(NamedTuple):
    buffer: Tensor
    owner: Hashable = None  # Key of its content; only compared
    # Tensors whose addresses are in `owner`: referenced, so that none is reused meanwhile
    alive: tuple[Tensor, ...] = ()


Slots = dict[tuple[torch.device, str], _Slot]


@dataclass
class PlannedWorkspace:
    """The workspace of a plan: buffers on meta, apart from the real ones."""

    cap: int  # Bytes, where the user has set none
    allocate: Callable[[int], Tensor]  # Returns a buffer of this many bytes on meta
    slots: Slots = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; they only grow."""
        return sum(slot.buffer.nbytes for slot in self.slots.values())


_slots: Slots = {}
_planned: ContextVar[PlannedWorkspace | None] = ContextVar("planned", default=None)
_cap: int | None = None
_recording = False


def set_workspace_cap(nbytes: int | None) -> None:
    """Bound the memory that experts' weights are dequantized into on a GPU.

    A weight over the bound is dequantized in slices, which costs time. The buffers of now
    are given back to the allocator.

    Args:
        nbytes: Bytes of one piece; at least one slice of 64 features is dequantized at a time.
            None is an eighth of the device's memory, as before the first call.
    """
    global _cap
    _cap = None if nbytes is None else int(nbytes)
    release_workspace()


def workspace_cap(device: torch.device) -> int:
    """Return the bound in bytes on this device."""
    if _cap is not None:
        return _cap
    if (planned := _planned_on(device)) is not None:
        return planned.cap
    if device.type != "cuda":
        return 4 << 30
    return int(torch.cuda.get_device_properties(device).total_memory) // WORKSPACE_PART


@contextmanager
def planned(workspace: PlannedWorkspace) -> Iterator[None]:
    """Let tensors on meta use this workspace, in this thread, as long as this lasts."""
    token = _planned.set(workspace)
    try:
        yield
    finally:
        _planned.reset(token)


def _planned_on(device: torch.device) -> PlannedWorkspace | None:
    return _planned.get() if device.type == "meta" else None


def _slots_on(device: torch.device) -> Slots:
    planned = _planned_on(device)
    return _slots if planned is None else planned.slots


def release_workspace() -> None:
    """Give all buffers back to the allocator."""
    _slots.clear()


def _persists(device: torch.device) -> bool:
    if device.type != "cuda" or _recording:
        return True
    return torch._C._cuda_getCurrentRawStream(device.index) == 0


@contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Let a CUDA graph that is recorded in the block use the shared buffers.

    The graph must be replayed on the default stream, `buffers` be referenced as long as it lives,
    and `forget` be called after each replay.
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
    """Return the shared buffers of a device."""
    return tuple(slot.buffer for key, slot in _slots.items() if key[0] == device)


def forget(device: torch.device) -> None:
    """Mark the buffers' content as unknown: a graph has written to them."""
    for key, slot in _slots.items():
        if key[0] == device:
            _slots[key] = _Slot(slot.buffer)


def is_current(name: str, device: torch.device, owner: Hashable) -> bool:
    """Whether the buffer of this name still has the content with this key."""
    slot = _slots_on(device).get((device, name))
    return owner is not None and slot is not None and slot.owner == owner and _persists(device)


def allocate(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    owner: Hashable = None, alive: tuple[Tensor, ...] = (),
) -> tuple[Tensor, bool]:  # fmt: skip
    """Return a contiguous tensor on the shared buffer, valid until the next call with this name.

    On other streams it is a tensor of its own. The second result says whether it already has the
    content with the key `owner`; None is no key. `alive` are tensors to reference as long as the
    key is recorded.
    """
    if not _persists(device):
        return torch.empty(shape, dtype=dtype, device=device), False
    slots, nbytes = _slots_on(device), math.prod(shape) * dtype.itemsize
    held, slot = is_current(name, device, owner), slots.pop((device, name), None)
    if slot is None or slot.buffer.numel() < nbytes:
        held, slot = False, None  # freed before the larger one is allocated
        if (planned := _planned_on(device)) is not None:
            buffer = planned.allocate(nbytes)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    else:
        buffer = slot.buffer
    slots[device, name] = _Slot(buffer, owner, alive)
    return buffer[:nbytes].view(dtype).view(shape), held


def in_backward() -> bool:
    """Whether the autograd engine runs this forward: a checkpoint's recomputation."""
    return torch._C._current_graph_task_id() != -1
