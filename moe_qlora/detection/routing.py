"""Count the tokens that each expert gets, by hooks on the experts modules behind detected routers.

A hook reads the `(T, k)` integers among a module's arguments: the router's choices. It adds on
their device, in an operator of torch's library: code that torch.compile makes and CUDA graphs
contain the count if it is there when they are made. Later hooks have no effect on them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.workspace import in_backward
from ..layout import base_model, unwrapped_name
from .detect import detect


@torch.library.custom_op("moe_qlora::count_experts", mutates_args=("counts",))
def _count(counts: Tensor, ids: Tensor) -> None:
    """Add ids `(T, k)` to counts `(E + 1,)` int64, but for a checkpoint's recomputation."""
    if not in_backward():
        flat, last = ids.reshape(-1).long(), len(counts) - 1
        flat = torch.where((flat < 0) | (flat > last), last, flat)
        counts.scatter_add_(0, flat, torch.ones_like(flat))


@contextmanager
def expert_counts(
    model: nn.Module, device: Any = "cpu", *, training: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Count assignments to experts in a block.

    Yields counts `(E + 1,)` int64 by the names that experts modules have without adapters; the last
    one is of ids of no expert. They move to the ids' device. `training` leaves evaluation out.
    """
    base, counts = base_model(model), dict[str, Tensor]()

    def hook_of(name: str) -> Any:
        def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for value in () if training and not module.training else (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
                    if counts[name].device != value.device:
                        counts[name] = counts[name].to(value.device)
                    _count(counts[name], value)
                    return

        return add

    with ExitStack() as hooks:
        for entry in detect(base).modules:
            if entry.router is not None:
                module, name = base.get_submodule(entry.name), unwrapped_name(entry.name)
                counts[name] = torch.zeros(entry.num_experts + 1, dtype=torch.int64, device=device)
                hook = module.register_forward_pre_hook(hook_of(name), with_kwargs=True)
                hooks.callback(hook.remove)
        if not counts:
            raise ConfigError(f"{type(base).__name__} has no fused experts behind a router.")
        yield counts
