"""`from_pretrained` with transformers' `DistributedConfig(fsdp_size=N)`.

transformers applies it to the model on meta, before a weight is read: it would wrap 16-bit
parameters that are never there. So it shards the model by its own plan, and then reads what is not
packed, a share on each rank. What is packed, or stands for a maker's codes, is made blank before
the sharding, hidden from the load, and filled after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from ..errors import ConfigError
from .agreement import Facts, check_agreement
from .filling import ShardedFill
from .sharding import allocate, device_of, shards_integers


class RankLoad:
    """One call of `from_pretrained` that gives each rank its part of the model."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def shards(self) -> bool:
        """Whether transformers shards the model by FSDP2."""
        sizes: Mapping[str, int] = {
            name: getattr(self.config, name, None) or 1
            for name in ("tp_size", "pp_size", "ep_size")
        }
        return self.config is not None and self.config.dp_size > 1 and set(sizes.values()) == {1}

    def begin(self, facts: Facts) -> None:
        """Compare what the ranks were given; refuse what packed weights do not support.

        Raises:
            ConfigError: The config asks for more than FSDP2.
        """
        check_agreement("from_pretrained", facts)
        for field in ("tp_size", "pp_size", "ep_size"):
            size = getattr(self.config, field, None) or 1
            if size > 1:
                raise ConfigError(
                    f"distributed_config has {field}={size}, which packed experts do not support: "
                    "shard the model by FSDP2 with DistributedConfig(fsdp_size=N), or load it "
                    "whole on each rank for DDP."
                )

    def fill(self, *args: Any) -> ConfiguredFill:
        """Return a `ConfiguredFill` of these arguments."""
        return ConfiguredFill(*args)


def _shard_instead(model: Any, instead: Callable[[Any, Any], None]) -> None:
    """Call `instead` where transformers is about to apply the config to this model on meta.

    It asks the model for the plans of the config, and then the config for its sizes.
    """

    def no_plans(self: Any, config: Any) -> tuple[dict[str, str], ...]:
        del self.__dict__["_resolve_parallel_plans"]
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


class ConfiguredFill(ShardedFill):
    """Fills this rank's shares, once transformers has sharded the model and loaded the rest."""

    def hide(self, conversions: list[Any], *, linears: bool) -> list[Any]:
        """Pack the model on meta with blank weights as well."""
        renamings, model = super().hide(conversions, linears=linears), self._model
        self.pack()
        # transformers loads what is neither packed nor dequantized
        self.targets = [
            target
            for target in self.targets
            if target.settings or not self.names.isdisjoint(self._aliases[target.name])
        ]
        for name in {*self.names, *self._linears}:
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
        own = {id(tensor) for target in self.targets for tensor in target.tensors()}
        self.names |= {name for name, tensor in model.named_parameters() if id(tensor) in own}
        _shard_instead(model, _shard_by_plan)
        return renamings

    def fill_before_tying(self) -> None:
        """Nothing is filled before all is loaded."""

    def finish(self) -> None:
        """Fill this rank's shares."""
        model = self._model
        self._unhide()
        sharded: Any = next(target.tensor() for target in self.targets if target.settings)
        device = device_of(sharded.device_mesh)
        offloaded = model.config.distributed_config.fsdp_cpu_offload
        allocate(model, device, torch.device("cpu") if offloaded else None)
        with self.opened:
            self.fill(device)


def _shard_by_plan(model: Any, config: Any) -> None:
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism

    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    with shards_integers():
        apply_fully_sharded_data_parallelism(model, model._mesh_manager, fsdp_plan, ep_plan)
