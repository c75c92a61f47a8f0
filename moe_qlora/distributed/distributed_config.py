"""`from_pretrained` with transformers' `DistributedConfig(fsdp_size=N)`.

transformers applies it to the model on meta, before a weight is read: it would wrap 16-bit
parameters that are never there. So it shards the model by its own plan, and then reads what is not
packed, a share on each rank. What is packed, or stands for a maker's codes, is made blank before
the sharding, hidden from the load, and filled after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..checkpoint.base import PlainBase
from ..checkpoint.integrity import open_shards
from ..checkpoint.load_spec import LoadSpec, kept_dtypes
from ..checkpoint.prequantized import PrequantizedCheckpoint
from ..errors import ConfigError
from ..hf.converters import COMPANION
from ..packing import parametrize
from .agreement import Facts, check_agreement
from .filling import CheckpointRows, ShardedWeights, targets_of
from .load_sharded import BlankModel, StoredWeights, aliases_of, device_of, pack_blanks
from .sharding import allocate, shards_integers

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


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

    def shard(self, *args: Any) -> ShardedLoad:
        """Return a `ShardedLoad` of these arguments."""
        return ShardedLoad(*args)


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


class ShardedLoad:
    """One load of a sharded model: what of it is packed, and how it is filled."""

    def __init__(
        self,
        model: Any,
        spec: LoadSpec,
        config: Any,
        folder: Path,
        dtype: torch.dtype | None,
        makers_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Pack a model on meta, whose Linear layers are bitsandbytes', with blank weights."""
        linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if parametrize.is_packed_linear(module)
        }
        kept = kept_dtypes(model, dtype)
        dtypes = dict(spec.dtypes)
        for name, module in linears.items():
            dtypes[name] = kept(name) or dtype or module.weight.dtype
        aliases = aliases_of(model)
        self.prequantized: PrequantizedCheckpoint | None = None
        dequantized: set[str] = set()
        self._fill: Callable[[ShardedWeights, torch.device], None]
        if spec.manifest is None:
            base = PlainBase(folder, model, makers_config)
            if isinstance(base.checkpoint, PrequantizedCheckpoint):
                self.prequantized = base.checkpoint
                dequantized = _dequantized(base, base.checkpoint)
            # Conv1D, which bitsandbytes replaces as well, stores `(in, out)`.
            kinds = {
                name: getattr(module, "source_cls", nn.Linear) for name, module in linears.items()
            }
            turned = {name for name, kind in kinds.items() if not issubclass(kind, nn.Linear)}
            read = CheckpointRows(base, aliases, turned)
            self._files: Any = base

            def fill(weights: ShardedWeights, device: torch.device) -> None:
                base.device = device
                weights.fill(read, device)

            self._fill = fill
        else:
            self._files = open_shards(folder, spec.manifest)
            stored = StoredWeights(model, spec.manifest, self._files)
            dtypes |= {} if spec.recasts else stored.dtypes()
            self._fill = lambda weights, _: stored.fill(weights)
        params = {id(param): param for param in spec.params.values()}
        settings, layout = spec.settings, spec.layout
        pack_blanks(BlankModel(model, config, settings, layout, tuple(params.values()), dtypes))
        self.weights = targets_of(model, settings, dtypes)
        # transformers loads what is neither packed nor dequantized
        self.weights.plain = {
            name: target
            for name, target in self.weights.plain.items()
            if dequantized & {name, *aliases.get(name, ())}
        }
        self._hide(model, [*spec.params, *linears, *self.weights.plain])
        _shard_instead(model, _shard_by_plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLoad:
        return self  # transformers copies its quantizer for every tensor

    def _hide(self, model: Any, names: list[str]) -> None:
        own = set()
        for target in self.weights.packed.values():
            held = [target.codes(), *target.statistics.parameters()]
            own |= {id(tensor) for tensor in held}
        own |= {id(target.tensor()) for target in self.weights.plain.values()}
        hidden = {name for name, tensor in model.named_parameters() if id(tensor) in own}

        def hide(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in hidden:
                state.pop(prefix + name, None)

        self._hook = model.register_state_dict_post_hook(hide)
        modules = {name.rpartition(".")[0] for name in names}
        for name in modules:
            model.get_submodule(name)._is_hf_initialized = True
        patterns = {rf"^{re.escape(name)}($|\.)" for name in names}
        patterns |= {rf"^{re.escape(name)}\.(SCB|weight_format)$" for name in modules}
        patterns.add(f"^{COMPANION}$")
        self._before = model.__dict__.get(_UNEXPECTED)
        setattr(model, _UNEXPECTED, set(getattr(model, _UNEXPECTED) or ()) | patterns)

    def finish(self, model: Any) -> None:
        """Fill this rank's shares of what is packed."""
        self._hook.remove()
        del model.__dict__[_UNEXPECTED]
        if self._before is not None:
            setattr(model, _UNEXPECTED, self._before)
        target = next(iter(self.weights.packed.values()))
        sharded: Any = target.codes()
        device = device_of(sharded.device_mesh)
        offloaded = model.config.distributed_config.fsdp_cpu_offload
        allocate(model, device, torch.device("cpu") if offloaded else None)
        try:
            self._fill(self.weights, device)
        finally:
            self._files.close()


def _dequantized(base: PlainBase, files: PrequantizedCheckpoint) -> set[str]:
    groups = base.layout.by_name.items()
    return {name for name, group in groups if any(map(files.is_dequantized, group.keys))}


def _shard_by_plan(model: Any, config: Any) -> None:
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism

    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    with shards_integers():
        apply_fully_sharded_data_parallelism(model, model._mesh_manager, fsdp_plan, ep_plan)
