"""FSDP2 over packed models: uint8 parameters on every torch, and which modules to shard.

Needs nothing else of its own: in the shardable layout (sharding.py) codes and statistics
are parameters, which `fully_shard` cuts and gathers as it does all others.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

Wrap = Collection[str] | Callable[[nn.Module], bool]
"""Which modules are sharded by themselves: names of classes, or what tells of a module."""


@contextmanager
def shards_integers() -> Iterator[None]:
    """Let `fully_shard` take integer parameters on every torch, within the block.

        with moe_qlora.shards_integers():
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

    torch before 2.13 asks gradients of each shard that it makes, and "only Tensors of floating
    point dtype can require gradients"; and a mixed precision policy casts codes as it gathers
    them, which destroys them. Parameters that are sharded in the block are gathered as they are,
    afterwards too. Where torch is right, nothing is changed.
    """
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

    module: Any = fsdp_param
    if _takes_integers():
        yield
        return
    stock, sharded = module.nn, module.FSDPParam
    build = sharded.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if not self.sharded_param.is_floating_point():
            self.init_dtype_attrs = types.MethodType(_keep_dtype, self)

    module.nn, sharded.__init__ = _NeuralNetworks(stock), init
    try:
        yield
    finally:
        module.nn, sharded.__init__ = stock, build


def _keep_dtype(self: Any, mp_policy: Any) -> None:
    """Set what `FSDPParam.init_dtype_attrs` sets, for a parameter that no policy casts."""
    self.orig_dtype = self.sharded_param.dtype
    self.param_dtype = self.reduce_dtype = None


def _takes_integers() -> bool:
    """Whether this torch's FSDP2 makes shards of integers without asking gradients of them."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


class _NeuralNetworks(types.ModuleType):
    """`torch.nn` whose `Parameter` asks no gradients of integers where nothing is said of them."""

    def __init__(self, stock: Any) -> None:
        super().__init__(stock.__name__)
        self._stock = stock

        class Same(type(stock.Parameter)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, stock.Parameter)

        class Parameter(stock.Parameter, metaclass=Same):
            def __new__(cls, data: Any = None, requires_grad: bool | None = None) -> Any:
                if requires_grad is None:
                    requires_grad = data is None or bool(data.is_floating_point())
                return stock.Parameter(data, requires_grad=requires_grad)

        self.Parameter = Parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def shard_model(
    model: nn.Module, mesh: Any, wrap: Wrap | None = None, **options: Any
) -> list[nn.Module]:
    """Apply `fully_shard` to a model's decoder layers and then to the rest of it; in place.

    Args:
        model: The model, with or without adapters, whose packed weights are in the shardable
            layout; it may be on meta.
        mesh: A `DeviceMesh` of one dimension, or of two, (copies, shards).
        wrap: The modules that are gathered and freed by themselves; by default those of the
            classes that the model itself says are not to be split.
        **options: Passed on to `fully_shard` (reshard_after_forward, mp_policy, offload_policy).

    Returns:
        The modules that are sharded by themselves.

    Raises:
        ConfigError: No module is chosen, or the model is wrapped already.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            kind = "FSDP2" if isinstance(module, FSDPModule) else "FSDP1"
            raise ConfigError(
                f"{name or 'The model'} is sharded by {kind} already: give the model as it was "
                "loaded."
            )
    blocks = _blocks(model, wrap)
    with shards_integers():
        for block in blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return blocks


def _blocks(model: nn.Module, wrap: Wrap | None) -> list[nn.Module]:
    """Return the modules to shard by themselves, inner ones first."""
    if wrap is None:
        classes = {name for part in model.modules() for name in _unsplit_classes(part)}
        wrap = classes
    if callable(wrap):
        chosen = [module for module in model.modules() if wrap(module)]
    else:
        names = set(wrap)
        chosen = [module for module in model.modules() if type(module).__name__ in names]
    blocks = [module for module in chosen if module is not model]
    if not blocks:
        raise ConfigError(
            f"No module of the model is chosen by wrap={wrap!r:.80}: name the class of its decoder "
            "layers, so that one layer is gathered at a time."
        )
    return blocks[::-1]


def _unsplit_classes(module: nn.Module) -> Collection[str]:
    # Not by getattr, which wrappers of PEFT answer for the module inside.
    names = getattr(type(module), "_no_split_modules", None)
    names = module.__dict__.get("_no_split_modules", names)
    return names if isinstance(names, (list, tuple, set, frozenset)) else ()


def allocate(
    model: nn.Module, device: torch.device, parameters: torch.device | None = None
) -> None:
    """Replace what of a sharded model is on meta by empty tensors: this rank's shares only.

    `parameters` is where parameters live, by default on the device as all else.
    """
    places: Mapping[bool, torch.device] = {True: parameters or device, False: device}
    owned = {id(parameter) for parameter in model.parameters()}

    def empty(tensor: Tensor) -> Tensor:
        place = places[id(tensor) in owned or isinstance(tensor, nn.Parameter)]
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    model._apply(empty)
