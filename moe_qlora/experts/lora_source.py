"""Where an experts module's forward gets its LoRA factors from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

_SOURCE = "_moe_qlora_lora"


@dataclass(frozen=True)
class LoraFactors:
    """One adapter's factors for one expert parameter, as PEFT stores them.

    `in` and `out` are of the matrix as it is applied, whichever way round the parameter is stored.
    """

    a: Tensor  # `(E r, in)`, `lora_A.weight`, expert slowest: `a.reshape(E, r, in)`
    b: Tensor  # `(out, r E)`, `lora_B.weight`, expert fastest: `b.reshape(out, r, E)`
    scaling: float  # Factor of the product
    dropout: nn.Module | None = None  # Module applied to the projection's input, or None

    @property
    def drops(self) -> bool:
        """Whether dropout changes the input now."""
        return self.dropout is not None and self.dropout.training


class LoraSource(Protocol):
    """What the forward asks for LoRA factors, at each call."""

    def active_lora(self, parameter_name: str) -> tuple[LoraFactors, ...]:
        """Return the factors of the adapters that are active now; empty where there are none."""


def set_lora_source(module: nn.Module, source: LoraSource) -> None:
    """Let the module's forward ask `source` for LoRA factors; a copy of the module keeps it."""
    module.__dict__[_SOURCE] = source


def clear_lora_source(module: nn.Module) -> None:
    """Undo `set_lora_source`; do nothing where none is set."""
    module.__dict__.pop(_SOURCE, None)


def lora_source(module: nn.Module) -> LoraSource | None:
    """Return the module's source of LoRA factors, None where none is set."""
    return cast("LoraSource | None", module.__dict__.get(_SOURCE))


def active_lora(module: nn.Module, name: str) -> tuple[LoraFactors, ...]:
    """Return the LoRA factors of one expert parameter that are active now."""
    source = lora_source(module)
    return source.active_lora(name) if source is not None else ()
