"""A model's state dict as a single process has it, gathered from the ranks that share the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..packing.gather import gather_to_first, own_state_dict, whole_tensors


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the model's whole state dict on the first rank, on the CPU; all others get `{}`.

    It has bitsandbytes' keys, as that of a model in a single process, whatever shares of the model
    this process holds. Tensors are gathered one at a time: no device holds two of them whole.

    All ranks must call it. Where nothing is sharded, and without a process group, it is the state
    dict itself. A `DistributedDataParallel` model's keys are those of the model in it.

    Raises:
        CheckpointError: Another rank was lost meanwhile.
    """
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = whole_tensors(inner, own_state_dict(inner))

    def collect(read: Callable[[str], Tensor]) -> dict[str, Any]:
        return {key: _on_cpu(read(key)) for key in tensors}

    gathered = gather_to_first(tensors, collect, "full_state_dict")
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    return gathered if first and gathered is not None else {}


def _on_cpu(value: Any) -> Any:
    """Return a tensor on the CPU; a module's extra state may be anything else."""
    return value.detach().cpu() if isinstance(value, Tensor) else value
