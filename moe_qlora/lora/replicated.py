"""Adapters that are put on a model which FSDP2 has sharded before: copies on every rank.

FSDP2 reduces the gradients of what it has sharded, and adapters that come later are none of it.
Here they start equal on all ranks, and each backward averages their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..errors import ConfigError

# The attribute by which transformers' Trainer, which does the same, marks a parameter as seen to.
_SEEN = "_replicated_grad_hook_registered"


def replicate_adapters(model: nn.Module) -> None:
    """Keep the trained parameters that FSDP2 does not manage equal on all ranks, from now on.

    All ranks call it. Parameters that are replaced or added later are seen to at the next forward.
    A model that is not sharded is left alone.
    """
    mesh = _mesh(model)
    if mesh is None:
        return
    hook = _Replicate(mesh)
    model.register_forward_pre_hook(hook)
    hook(model, ())


def check_copies(model: nn.Module, config: Any) -> None:
    """Raise where a LoRA config asks for copies of modules that FSDP2 has sharded."""
    names = getattr(config, "modules_to_save", None)
    if names and _mesh(model) is not None:
        raise ConfigError(
            f"modules_to_save={names!r} copies modules, and FSDP2 has sharded them already: give "
            "the config to moe_qlora.load_sharded, which shards the copies too."
        )


def _mesh(model: nn.Module) -> Any:
    """Return the mesh that FSDP2 has sharded a model over; None where it has not."""
    from torch.distributed.fsdp import FSDPModule

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    sharded: Any = next((p for p in model.parameters() if hasattr(p, "device_mesh")), None)
    return None if sharded is None else sharded.device_mesh


class _Replicate:
    """Sees to the trained parameters of a model that are whole on each rank of a mesh."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replicate:
        return self  # process groups cannot be copied

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            if not parameter.requires_grad or hasattr(parameter, "device_mesh"):
                continue
            if not getattr(parameter, _SEEN, False):
                for dimension in reversed(range(self.mesh.ndim)):
                    group = self.mesh.get_group(dimension)
                    source = distributed.get_global_rank(group, 0)
                    distributed.broadcast(parameter.data, src=source, group=group)
                parameter.register_post_accumulate_grad_hook(self._average)
                setattr(parameter, _SEEN, True)

    def _average(self, parameter: Tensor) -> None:
        # Right with several backwards to a step too: what earlier ones left is equal on all ranks.
        gradient = parameter.grad
        if gradient is None:
            return
        for dimension in range(self.mesh.ndim):
            distributed.all_reduce(gradient, group=self.mesh.get_group(dimension))
        gradient.div_(self.mesh.size())
