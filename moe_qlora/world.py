"""The rooms that run above all others, handed down: many ranks of one model, and host memory.

No other room imports distributed/ or train/. torch is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

NOT_GIVEN: Final[Any] = object()  # Default of a `state_dict` argument, different from None

CHECKED = "_moe_qlora_checked"  # attribute of a model: DDP's ranks were compared


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of a state dict: its whole dtype and shape, and how it is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None  # None: known after gathering
    source: Any  # the state dict's value: the tensor itself, or this rank's share
    gather: Callable[[], Tensor]  # if `divided`, all ranks must call it
    divided: bool


def runs_distributed() -> bool:
    """True if a process group is initialized, or torchrun started this process."""
    from torch import distributed

    if not distributed.is_available():
        return False
    return distributed.is_initialized() or distributed.is_torchelastic_launched()


def world() -> Any:
    """Return distributed/ranks.py, whose functions serve a single process too."""
    return import_module(".distributed.ranks", __package__)


def offload(model: nn.Module) -> None:
    """Move a model's packed experts to host memory."""
    import_module(".train.offload", __package__).offload_experts(model)
