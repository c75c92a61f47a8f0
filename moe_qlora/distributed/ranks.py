"""The implementation of world.py's interface for several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..errors import AdapterError, ConfigError
from ..layout import unwrapped_name
from ..packing.decoders import PackedList, is_shardable, is_share
from ..packing.parametrize import decoder_of, is_hosted, iter_packed, original_of
from ..world import CHECKED, World
from . import gather
from .adapters import check_copies, replicate_adapters
from .agreement import check_agreement, model_facts
from .sharding import lay_out


class ManyRanks(World):
    """Several ranks, each with the model or a share of it."""

    several = True

    @property
    def first(self) -> bool:
        return not distributed.is_initialized() or distributed.get_rank() == 0

    def lay_out(self, model: nn.Module) -> None:
        lay_out(model)

    def load(self, distributed_config: Any) -> Any:
        """Return the `RankLoad` of a `DistributedConfig`."""
        from .distributed_config import RankLoad

        return RankLoad(distributed_config)

    def device(self) -> int | None:
        # In every rank the current device is the first, unless the program has set another.
        if not torch.cuda.is_available() or torch.cuda.current_device():
            return None
        rank = distributed.get_node_local_rank(fallback_rank=0)
        # Where each rank sees one device only, that is its own.
        return rank if 0 < rank < torch.cuda.device_count() else None

    def prepare_adapters(self, model: nn.Module, config: Any) -> None:
        lay_out(model)
        check_copies(model, config)

    def follow_adapters(self, model: nn.Module) -> None:
        replicate_adapters(model)

    def check_unsharded(self, model: nn.Module, action: str, advice: str) -> None:
        engine = any(isinstance(module, FSDPModule) for module in model.modules())
        for name, parameter in model.named_parameters():
            if engine or is_share(parameter):
                raise AdapterError(
                    f"{action} needs whole weights, and {unwrapped_name(name)} is sharded over "
                    f"ranks: {advice}."
                )

    def before_forward(self, model: nn.Module) -> None:
        if distributed.is_initialized():
            done: set[str] = model.__dict__.setdefault(CHECKED, set())
            _refuse_sharded_host(model)
            if "layout" not in done and _warn_of_whole_statistics(model):
                done.add("layout")
            if "copies" not in done and torch.is_grad_enabled() and _check_ddp_copies(model):
                done.add("copies")

    def stock_class(self, module: nn.Module) -> type:
        return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)

    state_dict_to_save = staticmethod(gather.state_dict_to_save)
    is_divided = staticmethod(gather.is_divided)
    plain_tensor = staticmethod(gather.plain_tensor)
    whole_tensors = staticmethod(gather.whole_tensors)
    gather_to_first = staticmethod(gather.gather_to_first)


def _refuse_sharded_host(model: nn.Module) -> None:
    """Raise where an engine has sharded a model whose experts lie in host memory.

    Both may come after steps without the other, so each forward looks.
    """
    lists = (module for module in model.modules() if isinstance(module, PackedList))
    if all(each.host is None for each in lists):
        return
    engine = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, module, leaf in iter_packed(model):
        codes = original_of(module, leaf)
        zero = hasattr(codes, "ds_id")
        if is_hosted(module) and (engine or zero or hasattr(codes, "device_mesh")):
            own = "ZeRO's zero_optimization.offload_param" if zero else "FSDP2's CPUOffloadPolicy"
            raise ConfigError(
                f"{unwrapped_name(name)}.{leaf} lies in host memory, by offload_experts, and the "
                "model is sharded over ranks: train it under DDP, or call remove() on what "
                f"offload_experts returned before sharding, and let the engine offload ({own})."
            )


def _warn_of_whole_statistics(model: nn.Module) -> bool:
    """Return whether all packed weights are sharded by now."""
    for name, module, leaf in iter_packed(model):
        if not hasattr(original_of(module, leaf), "device_mesh"):
            return False
        if not is_shardable(decoder_of(module, leaf)):
            warnings.warn(
                f"{unwrapped_name(name)}.{leaf} was sharded with its statistics whole on every "
                "rank: call moe_qlora.prepare_sharding(model) before fully_shard, which then "
                "shards them too.",
                UserWarning,
                stacklevel=2,
            )
            break
    return True


def _check_ddp_copies(model: nn.Module) -> bool:
    """Raise before the first step where DDP's ranks were packed or adapted differently.

    DDP writes the first rank's parameters over all others', and leaves statistics and settings.
    Within its forward with gradients all ranks take part; return whether this is one.
    """
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None:
        group = ddp.process_group
        check_agreement("DistributedDataParallel", lambda: model_facts(model), group=group)
    return ddp is not None
