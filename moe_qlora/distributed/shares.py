"""One rank's share of a layer's experts, under expert parallelism: which ones it holds.

A rank holds the experts `[first, last)` of each layer as a packed weight of their own
(`Codec.cut`), and as LoRA factors of their own (divided.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from ..errors import QuantizationError, first_line
from ..layout import unwrapped
from ..world import SHARE, share_of
from . import divided


@dataclass(frozen=True, eq=False)
class ExpertShare:
    """The experts `[first, last)` that this rank holds of a layer's `experts`.

    `mesh` is a `DeviceMesh` whose last dimension divides the experts; ranks along the other one, if
    there is one, hold copies. `batches` is the number of different batches that all its ranks see
    in a step together.
    """

    experts: int
    first: int
    last: int
    mesh: Any
    batches: int

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShare:
        return self  # process groups cannot be copied, and the copy of a model uses the same ones

    @property
    def count(self) -> int:
        """Number of experts that this rank holds."""
        return self.last - self.first

    @property
    def group(self) -> Any:
        """The process group whose ranks hold all experts together."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def copies(self) -> Any:
        """The process group whose ranks hold the same experts; None where each is held once."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 and self.mesh.size(0) > 1 else None

    def mean(self, name: str, absmax: Tensor) -> Tensor:
        """Return the mean of a weight's absmax, of which each rank of the group holds as many.

        It has the bits of the mean of all absmax in one tensor. All ranks of the group must call
        it; where one does not, it is a `QuantizationError`.
        """
        parts = [torch.empty_like(absmax) for _ in range(distributed.get_world_size(self.group))]
        gather_absmax(name, parts, absmax.contiguous(), self.group)
        return torch.cat(parts).mean()

    def factors(self, a: nn.Parameter, b: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """Return this rank's part of the whole `lora_A` `(E r, in)` and `lora_B` `(out, r E)`."""
        return divided.divided_factors(a, b, self)

    def local(self, factor: Tensor) -> Tensor:
        """Return this rank's part of a factor, whose gradient is averaged over all batches."""
        return divided.local_factor(factor, self)


def gather_absmax(name: str, parts: list[Tensor], absmax: Tensor, group: Any) -> None:
    """Gather each rank's absmax of a weight into `parts`; `QuantizationError` where one is lost."""
    try:
        distributed.all_gather(parts, absmax, group=group)
    except RuntimeError as error:
        raise QuantizationError(
            f"Packing {name} failed on rank {distributed.get_rank()} while it gathered absmax "
            f"from all ranks ({first_line(error)}): every rank must take part to the end; load "
            "the model again."
        ) from error


def expert_share(module: nn.Module) -> ExpertShare | None:
    """Return which experts a module holds; None where it holds all of its layer's."""
    return cast("ExpertShare | None", share_of(module))


def set_share(module: nn.Module, share: ExpertShare) -> None:
    """Note which experts a module holds."""
    module.__dict__[SHARE] = share


class LocalNames:
    """The names of `local_tensors`, found anew whenever they are asked for: adapters come later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        return iter(local_tensors(self.model))


def keep_from_ddp(model: nn.Module) -> None:
    """Let DDP, which would overwrite them with the first rank's, leave local tensors alone.

    It asks the module that it wraps for their names, by the attribute that
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` sets.
    """
    host: Any = model
    host._ddp_params_and_buffers_to_ignore = LocalNames(model)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers of experts that no other rank may overwrite.

    These are the packed weights and biases of modules with a share, and the LoRA factors on them.
    """
    names: dict[str, Tensor] = {}
    held = {id(module) for module in model.modules() if share_of(module) is not None}
    for prefix, module in model.named_modules():
        if id(unwrapped(module)) not in held:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names[f"{prefix}.{name}".lstrip(".")] = tensor
    return names
