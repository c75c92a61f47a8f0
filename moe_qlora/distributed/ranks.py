"""What other rooms ask of many ranks (`world()`); in a single process nothing is sharded."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..errors import AdapterError, ConfigError
from ..layout import unwrapped_name
from ..packing.decoders import PackedList, is_share
from ..packing.parametrize import iter_packed, read_packed
from ..packing.settings import CodecSettings
from ..world import CHECKED, runs_distributed
from . import sharding
from .gather import (  # noqa: F401
    check_agreement,
    from_first,
    gather_to_first,
    is_divided,
    plain_tensor,
    state_dict_to_save,
    whole_tensors,
)
from .gathered import fix_gather, gathered_nbytes, is_gathered_twice, keep_root  # noqa: F401
from .load_sharded import RankLoad  # noqa: F401
from .sharding import shards_integers  # noqa: F401

# transformers' Trainer, which averages gradients too, marks a parameter by this attribute.
_SEEN = "_replicated_grad_hook_registered"


def is_first() -> bool:
    """True if this process writes files."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def lay_out(model: nn.Module) -> None:
    """Give packed weights the layout that engines can shard, if this run has several ranks."""
    if runs_distributed():
        sharding.lay_out(model)


def own_device() -> int | None:
    """Return the index of this rank's CUDA device; None for the current one."""
    # In every rank the current device is the first, unless the program has set another.
    if not runs_distributed() or not torch.cuda.is_available() or torch.cuda.current_device():
        return None
    rank = distributed.get_node_local_rank(fallback_rank=0)
    # Where each rank sees one device only, that is its own.
    return rank if 0 < rank < torch.cuda.device_count() else None


def prepare_adapters(model: nn.Module, config: Any) -> None:
    """Lay a model out before it gets adapters; raise if it is too late for them."""
    lay_out(model)
    names = getattr(config, "modules_to_save", None)
    if names and _mesh(model) is not None:
        raise ConfigError(
            f"modules_to_save={names!r} copies modules, and FSDP2 has sharded them already: "
            "give the config to moe_qlora.load_sharded, which shards the copies too."
        )


def check_unsharded(model: nn.Module, action: str, advice: str) -> None:
    """Raise an `AdapterError` if weights are sharded, and `action` needs whole ones."""
    engine = uses_fsdp(model)
    for name, parameter in model.named_parameters():
        if engine or is_share(parameter):
            raise AdapterError(
                f"{action} needs whole weights, and {unwrapped_name(name)} is sharded over "
                f"ranks: {advice}."
            )


def before_forward(model: nn.Module) -> None:
    """Check the changes by engines to a packed model, before a forward of it."""
    if not distributed.is_initialized():
        return
    hosted = [each for each in model.modules() if isinstance(each, PackedList) and each.host]
    sharded = any(is_share(each.original) or hasattr(each.original, "ds_id") for each in hosted)
    if sharded or (hosted and uses_fsdp(model)):  # at any step
        raise ConfigError(
            "Experts lie in host memory, by offload_experts, and the model is sharded over ranks: "
            "train it under DDP, or call remove() on what offload_experts returned before "
            "sharding, and let the engine offload (FSDP2's CPUOffloadPolicy, or ZeRO's "
            "zero_optimization.offload_param)."
        )
    # DDP writes the first rank's parameters over all others', and leaves settings.
    ddp: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None or model.__dict__.get(CHECKED) or not torch.is_grad_enabled():
        return
    settings = (
        CodecSettings.of(read_packed(m, leaf)).to_dict() for _, m, leaf in iter_packed(model)
    )
    facts: dict[str, Any] = {"the codec of experts": {str(each) for each in settings}}
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        facts[f"lora_config of {name!r}"] = config
    check_agreement("DistributedDataParallel", lambda: facts, group=ddp.process_group)
    model.__dict__[CHECKED] = True


def uses_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 has taken a model or modules of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def gather_once(layers: Iterable[nn.Module], once: bool) -> None:
    """Let FSDP2 keep layers that it shards gathered from their forward until their backward."""
    for layer in layers:
        cast(FSDPModule, layer).set_reshard_after_forward(not once, recurse=False)


def stock_class(module: nn.Module) -> type:
    """Return the class of a module before FSDP2 replaced it."""
    return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)


def follow_adapters(model: nn.Module) -> None:
    """Keep the trained parameters that FSDP2 does not manage equal on all ranks, from now on.

    All ranks call it. Parameters that are replaced or added later are included at the next forward.
    A model that is not sharded is not changed.
    """
    mesh = _mesh(model)
    if mesh is None:
        return

    def average(parameter: Tensor) -> None:
        # Right with several backwards a step too: earlier ones' gradients are equal on all ranks.
        gradient = parameter.grad
        if gradient is not None:
            for dimension in range(mesh.ndim):
                distributed.all_reduce(gradient, group=mesh.get_group(dimension))
            gradient.div_(mesh.size())

    @torch.no_grad()
    def replicate(module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            trained = parameter.requires_grad and not hasattr(parameter, "device_mesh")
            if trained and not getattr(parameter, _SEEN, False):
                from_first(mesh, distributed.broadcast, parameter.data)
                parameter.register_post_accumulate_grad_hook(average)
                setattr(parameter, _SEEN, True)

    model.register_forward_pre_hook(replicate)
    replicate(model, ())


def _mesh(model: nn.Module) -> Any:
    if not uses_fsdp(model):
        return None
    return next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
