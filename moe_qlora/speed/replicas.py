"""Experts in host memory under DDP: each rank has its own, which DDP must leave alone.

DDP asks the module that it wraps what to ignore, by the attribute that its own
`_set_params_and_buffers_to_ignore_for_model` sets. Else it would broadcast codes that lie in host
memory, and refuse a model with parameters on two kinds of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..packing.packed_list import PackedList

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_AROUND = ("", "base_model.model.", "_orig_mod.", "_orig_mod.base_model.model.")
"""What PEFT and torch.compile put before the names of the model, whose attribute they forward."""


def keep_from_ddp(model: nn.Module) -> None:
    """Make DDP ignore what lies in host memory of a model, or of one that wraps it later."""
    host: Any = model
    if not isinstance(model.__dict__.get(_IGNORED), _Names):
        setattr(host, _IGNORED, _Names(model, model.__dict__.get(_IGNORED, ())))


class _Names:
    """Names of parameters and buffers in host memory, looked up at each iteration."""

    def __init__(self, model: nn.Module, others: Iterable[str]) -> None:
        self.model, self.others = model, others

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for prefix, module in self.model.named_modules():
            if isinstance(module, PackedList) and module.host is not None:
                for name, _ in (*module.named_parameters(), *module.named_buffers()):
                    for around in _AROUND:
                        yield f"{around}{prefix}.{name}"
