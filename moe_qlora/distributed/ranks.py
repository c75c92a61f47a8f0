"""The implementation of world.py's interface for several ranks."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..errors import AdapterError, ConfigError
from ..layout import unwrapped_name
from ..packing.decoders import PackedList, is_shardable, is_share, linear_kind
from ..packing.parametrize import (
    decoder_of,
    is_hosted,
    is_packed_linear,
    iter_packed,
    original_of,
    read_packed,
)
from ..packing.settings import CodecSettings
from ..world import CHECKED, World
from . import gather
from .gather import check_agreement, from_first
from .sharding import lay_out

# transformers' Trainer, which averages gradients too, marks a parameter by this attribute.
_SEEN = "_replicated_grad_hook_registered"
_SAMPLE = 512  # values of a tensor that are compared
_WEIGHTS = 8  # packed weights whose codes and statistics are sampled


class ManyRanks(World):
    """Several ranks, each with the model or a share of it."""

    several = True

    @property
    def first(self) -> bool:
        return not distributed.is_initialized() or distributed.get_rank() == 0

    def lay_out(self, model: nn.Module) -> None:
        lay_out(model)

    def load(self, distributed_config: Any) -> Any:
        from .load_sharded import RankLoad

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
        names = getattr(config, "modules_to_save", None)
        if names and _mesh(model) is not None:
            raise ConfigError(
                f"modules_to_save={names!r} copies modules, and FSDP2 has sharded them already: "
                "give the config to moe_qlora.load_sharded, which shards the copies too."
            )

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
    """Raise where an engine has sharded a model whose experts lie in host memory, at any step."""
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


def replicate_adapters(model: nn.Module) -> None:
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
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    return next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return how a model is packed, samples of its packed weights, and its adapters' state."""
    packed = [
        (f"{owner}.{leaf}", read_packed(module, leaf)) for owner, module, leaf in iter_packed(model)
    ]
    linears: list[Any] = [module for module in model.modules() if is_packed_linear(module)]
    facts: dict[str, Any] = {
        "the codec of experts": {str(CodecSettings.of(weight).to_dict()) for _, weight in packed},
        "the codec of Linear layers": {
            f"{linear_kind(layer)}, nested {getattr(layer.weight, 'compress_statistics', None)}, "
            f"computed in {getattr(layer, 'compute_dtype', None)}"
            for layer in linears
        },
    }
    for name, weight in packed[:: max(len(packed) // _WEIGHTS, 1)]:
        statistics = weight.absmax if weight.nested is None else weight.nested.absmax
        digest = hashlib.sha256()
        for tensor in (weight.flat_codes, weight.absmax, statistics):
            flat = tensor.detach().reshape(-1)
            digest.update(flat[:: max(len(flat) // _SAMPLE, 1)].cpu().numpy().tobytes())
        facts[f"{name} of the content"] = digest.hexdigest()[:12]
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        facts[f"lora_config of {name!r}"] = config
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict):  # an adapter's layer
            layer: Any = module
            off = getattr(layer, "disable_adapters", False)
            facts[f"the active adapters of {name}"] = [] if off else list(layer.active_adapters)
            facts[f"the merged adapters of {name}"] = list(layer.merged_adapters)
            facts[f"the scaling of {name}"] = dict(layer.scaling)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            facts[f"requires_grad of {name}"] = True
    return facts
