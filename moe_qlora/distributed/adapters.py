"""Adapters on a model without values yet, or that is sharded already, as on a whole one.

PEFT draws an adapter's factors on the CPU and moves them to its base layer's device. Where that is
meta, this rank's share of their values is saved until the model is sharded and allocated. Every
rank draws the same numbers: those of the first rank's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper as StockParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, distributed, nn

from ..errors import ConfigError
from ..lora.model import get_peft_model
from .filling import Ranks, put_local

# transformers' Trainer, which averages gradients too, marks a parameter by this attribute.
_SEEN = "_replicated_grad_hook_registered"


class BlankAdapters:
    """A model's adapters on meta, and this rank's share of what was drawn for them."""

    def __init__(self, base: nn.Module, config: Any, mesh: Any, options: Mapping[str, Any]) -> None:
        """Put adapters on a model on meta, in place: `get_peft_model` with these options."""
        if not isinstance(config, LoraConfig):
            raise ConfigError(
                f"lora_config is a {type(config).__name__}: a model without values takes a "
                "LoraConfig only."
            )
        start = config.init_lora_weights
        if start not in (True, False, "gaussian") or config.use_dora:
            asked = "use_dora=True" if config.use_dora else f"init_lora_weights={start!r}"
            raise ConfigError(
                f"{asked} computes with the base weights, which no rank has whole: set "
                "init_lora_weights to True, False or 'gaussian', and use_dora to False."
            )
        last = mesh.ndim - 1
        self._ranks = Ranks(mesh.get_local_rank(last), mesh.size(last))
        # (a factor's module, its name there) -> this rank's rows as they were drawn
        self._drawn: dict[tuple[nn.Module, str], Tensor] = {}
        state = [torch.get_rng_state()]
        _from_first(mesh, distributed.broadcast_object_list, state)
        with torch.random.fork_rng(devices=[]), self._saving():
            torch.set_rng_state(state[0])
            self.model: PeftModel = get_peft_model(base, config, **options)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        name = "_move_adapter_to_device_of_base_layer"
        stock = {cls: cls.__dict__[name] for cls in (BaseTunerLayer, StockParamWrapper)}

        def saving(move: Any) -> Any:
            def replaced(layer: Any, adapter: str, *args: Any) -> None:
                drawn = [(m, leaf, m._parameters[leaf]) for m, leaf in _factors(layer, adapter)]
                move(layer, adapter, *args)
                for owner, leaf, values in drawn:
                    moved = owner._parameters[leaf]
                    if values is not None and moved is not None and moved.device != values.device:
                        share = values.detach()[slice(*self._ranks.span(len(values)))]
                        # PEFT rounds factors to the base layer's dtype, and may widen them again.
                        self._drawn[owner, leaf] = share.to(moved.dtype, copy=True)

            return replaced

        for cls, move in stock.items():
            setattr(cls, name, saving(move))
        try:
            yield
        finally:
            for cls, move in stock.items():
                setattr(cls, name, move)

    @torch.no_grad()
    def fill(self) -> None:
        """Fill the factors of the model, which must be sharded and allocated."""
        for (owner, leaf), share in self._drawn.items():
            put_local(owner._parameters[leaf], share)
        self._drawn.clear()
        for module in self.model.modules():
            if isinstance(module, AuxiliaryTrainingWrapper) and hasattr(module, "modules_to_save"):
                source: Any = module.original_module
                for copied in module.modules_to_save.values():
                    own = dict((*copied.named_parameters(), *copied.named_buffers()))
                    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
                        put_local(own[name], getattr(tensor, "_local_tensor", tensor))


def _factors(layer: Any, adapter: str) -> Iterator[tuple[nn.Module, str]]:
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        held = getattr(layer, name, None)
        if isinstance(held, nn.ParameterDict) and adapter in held:
            yield held, adapter
        elif isinstance(held, nn.ModuleDict) and adapter in held:
            for module in held[adapter].modules():
                for leaf in module._parameters:
                    yield module, leaf


def _from_first(mesh: Any, broadcast: Callable[..., Any], value: Any) -> None:
    """Broadcast a value of a mesh's first rank to all others."""
    for group in reversed([mesh.get_group(dimension) for dimension in range(mesh.ndim)]):
        broadcast(value, src=distributed.get_global_rank(group, 0), group=group)


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
                _from_first(mesh, distributed.broadcast, parameter.data)
                parameter.register_post_accumulate_grad_hook(average)
                setattr(parameter, _SEEN, True)

    model.register_forward_pre_hook(replicate)
    replicate(model, ())


def check_copies(model: nn.Module, config: Any) -> None:
    """Raise where a LoRA config asks for copies of modules that FSDP2 has sharded."""
    names = getattr(config, "modules_to_save", None)
    if names and _mesh(model) is not None:
        raise ConfigError(
            f"modules_to_save={names!r} copies modules, and FSDP2 has sharded them already: give "
            "the config to moe_qlora.load_sharded, which shards the copies too."
        )


def _mesh(model: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    return next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
