"""`from_pretrained` with transformers' `DistributedConfig(fsdp_size=N)`.

Before transformers shards the model on meta, by its own plan, what is packed, or stands for a
maker's codes, is made blank and hidden from the load; it is filled once all else is read.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ..errors import ConfigError
from .agreement import Facts, check_agreement
from .filling import ShardedFill
from .sharding import allocate, device_of, shards_integers


class ConfiguredFill(ShardedFill):
    """Fills this rank's shares, once transformers has sharded the model and loaded the rest."""

    def hide(self, conversions: list[Any], *, linears: bool) -> list[Any]:
        """Pack the model on meta with blank weights as well."""
        renamings, model = super().hide(conversions, linears=linears), self.model
        self.pack()
        # transformers loads what is neither packed nor dequantized
        self.targets = [
            target
            for target in self.targets
            if target.settings or not self.names.isdisjoint(self._aliases[target.name])
        ]
        for name in {*self.names, *self.linears}:
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
        own = {id(tensor) for target in self.targets for tensor in target.tensors()}
        self.names |= {name for name, tensor in model.named_parameters() if id(tensor) in own}
        # transformers shards next; a load that fails undoes this when it drops the fill
        self._sharding = ExitStack()
        self._sharding.enter_context(shards_integers())
        return renamings

    def _fill(self, missing: Any) -> None:
        """Nothing is filled before all is loaded."""

    def finish(self) -> None:
        """Fill this rank's shares."""
        self._sharding.close()
        self.unhide()
        sharded: Any = next(target.tensor() for target in self.targets if target.settings)
        device = device_of(sharded.device_mesh)
        offloaded = self.model.config.distributed_config.fsdp_cpu_offload
        allocate(self.model, device, torch.device("cpu") if offloaded else None)
        with self.files:
            self.fill(device)


class RankLoad:
    """One call of `from_pretrained` that gives each rank its part of the model."""

    fill = ConfiguredFill

    def __init__(self, config: Any) -> None:
        self.config = config
        self.shards = getattr(config, "dp_size", 1) > 1  # by FSDP2

    def begin(self, facts: Facts) -> None:
        """Compare what the ranks were given; refuse a config that asks for more than FSDP2."""
        check_agreement("from_pretrained", facts)
        for field in ("tp_size", "pp_size", "ep_size"):
            size = getattr(self.config, field, None) or 1
            if size > 1:
                raise ConfigError(
                    f"distributed_config has {field}={size}, which packed experts do not support: "
                    "shard the model by FSDP2 with DistributedConfig(fsdp_size=N), or load it "
                    "whole on each rank for DDP."
                )
