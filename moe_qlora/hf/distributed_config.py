"""Loads in a distributed run: each rank's device, and transformers' `DistributedConfig`.

transformers applies a `DistributedConfig` to the model on meta, before a weight is read: it would
wrap 16-bit parameters that are never there. With `ep_size` the quantizer divides the experts, and
transformers leaves the model alone. What is not an expert is whole on each rank, to be wrapped by
DDP or FSDP2 once it has adapters; Trainer averages its gradients without either. With `fsdp_size`
alone the model is sharded once its packed weights are there, blank (fsdp_loading.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import distributed

from ..errors import ConfigError
from ..packing.sharding import runs_distributed

_ADVICE = (
    "shard the model with DistributedConfig(fsdp_size=N), or divide its experts with fsdp_size=N, "
    "ep_size=N"
)


def own_device() -> int | None:
    """Return the index of this rank's CUDA device, None where the current one is right.

    In every rank the current device is the first, unless the program has set another.
    """
    if not runs_distributed() or not torch.cuda.is_available() or torch.cuda.current_device():
        return None
    rank = distributed.get_node_local_rank(fallback_rank=0)
    # Where each rank sees one device only, that is its own.
    return rank if 0 < rank < torch.cuda.device_count() else None


def mesh_of(config: Any) -> Any:
    """Return the mesh that a `DistributedConfig` divides experts over, None where it is None.

    It is `(ep_size,)`, or `(copies, ep_size)` where several ranks hold the same experts.

    Raises:
        ConfigError: The config asks for more than expert parallelism.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if config is None or not distributed.is_initialized():
        return None
    for field in ("tp_size", "pp_size"):
        if getattr(config, field) > 1:
            raise ConfigError(
                f"distributed_config has {field}={getattr(config, field)}, which packed weights do "
                f"not support: {_ADVICE}."
            )
    ranks = config.ep_size
    if ranks == 1:
        return None
    accelerator = torch.accelerator.current_accelerator()
    device = "cpu" if accelerator is None else accelerator.type
    copies = distributed.get_world_size() // ranks
    if copies == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("experts",))
    return init_device_mesh(device, (copies, ranks), mesh_dim_names=("copies", "experts"))


def keep_whole(model: Any, instead: Callable[[Any, Any], None] | None = None) -> None:
    """Let transformers, which is about to apply the config to this model on meta, leave it alone.

    It asks the model for the plans of the config, and then the config for its sizes. `instead` is
    called with both at that time.
    """

    def no_plans(self: Any, config: Any) -> tuple[dict[str, str], ...]:
        del self.__dict__["_resolve_parallel_plans"]
        if instead is not None:
            instead(self, config)
        config.__class__ = _without_sizes(type(config))
        return {}, {}, {}

    model._resolve_parallel_plans = MethodType(no_plans, model)


def _without_sizes(cls: Any) -> Any:
    """Return a config's class whose instance has sizes of 1, until the last one is asked for."""

    def last(self: Any) -> int:
        self.__class__ = cls
        return 1

    members = {"ep_size": property(lambda self: 1), "dp_size": property(last)}
    return type(cls.__name__, (cls,), members)
