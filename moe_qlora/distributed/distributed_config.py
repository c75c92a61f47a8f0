"""`from_pretrained` on several ranks: each one's device, and transformers' `DistributedConfig`.

transformers applies a `DistributedConfig` to the model on meta, before a weight is read: it would
wrap 16-bit parameters that are never there.

    ep_size            the quantizer reads, packs and keeps each rank's experts, and transformers
                       leaves the model alone. What is not an expert is whole on each rank, to be
                       wrapped by DDP or FSDP2 once it has adapters; Trainer averages its gradients
                       without either.
    fsdp_size alone    transformers shards the model by its own plan, and then reads what is not
                       packed, a share on each rank. What is packed, or stands for a maker's codes,
                       is made blank before the sharding, hidden from the load, and filled after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import distributed, nn

from ..checkpoint.base import PlainBase
from ..checkpoint.integrity import open_shards
from ..checkpoint.load_spec import LoadSpec, kept_dtypes
from ..checkpoint.prequantized import PrequantizedCheckpoint
from ..errors import ConfigError, UnsupportedWeightError
from ..hf.prequantized import COMPANION
from ..packing import parametrize
from . import expert_parallel
from .agreement import Facts, check_agreement
from .filling import CheckpointRows, ShardedWeights, targets_of
from .load_sharded import BlankModel, StoredWeights, aliases_of, device_of, pack_blanks
from .sharding import allocate, shards_integers
from .shares import ExpertShare

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
_ADVICE = (
    "shard the model with DistributedConfig(fsdp_size=N), or divide its experts with fsdp_size=N, "
    "ep_size=N"
)


class RankLoad:
    """One call of `from_pretrained` that gives each rank its part of the model."""

    def __init__(self, config: Any, expert_mesh: Any = None) -> None:
        """Either a `DistributedConfig` or a `DeviceMesh` that divides the experts is given."""
        self.config, self.mesh = config, expert_mesh

    @property
    def shards(self) -> bool:
        """Whether transformers shards the model by FSDP2."""
        return shards_model(self.config)

    def begin(self, model: Any, facts: Facts) -> None:
        """Compare what the ranks were given, and keep transformers from dividing experts itself."""
        check_agreement("from_pretrained", facts)
        mesh = mesh_of(self.config)
        if mesh is not None:
            self.mesh = mesh
            keep_whole(model)

    def shares(self, model: Any, spec: LoadSpec) -> dict[str, ExpertShare]:
        """Return which experts this rank keeps of each weight, by all of its names."""
        return {} if self.mesh is None else load_shares(model, spec, self.mesh)

    def shard(self, *args: Any) -> ShardedLoad:
        """Return a `ShardedLoad` of these arguments."""
        return ShardedLoad(*args)


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


def load_shares(model: Any, spec: LoadSpec, mesh: Any) -> dict[str, ExpertShare]:
    """Return the experts that this rank keeps of each weight that a load packs."""
    expert_parallel.check_mesh(mesh)
    ranks = mesh.size(mesh.ndim - 1)
    found: dict[str, ExpertShare] = {}
    for entry in expert_parallel.modules_to_divide(model, spec.layout, ranks):
        share = expert_parallel.make_share(entry.num_experts, mesh, mesh.size())
        for param in entry.parameters:
            settings = spec.settings_of(param.name)
            reason = settings.codec.why_not_cut(param.shape, ranks, settings)
            if reason is not None and param.name in spec.params:
                raise UnsupportedWeightError(f"{param.name} {reason}. Nothing was loaded.")
            found |= dict.fromkeys(param.names, share)
    return {name: share for name, share in found.items() if name in spec.params}


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
            self._fill = partial(_fill_packing, base, read)
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
        keep_whole(model, _shard_by_plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLoad:
        return self  # transformers copies its quantizer for every tensor

    def _hide(self, model: Any, names: list[str]) -> None:
        """Keep the load from looking for what is filled later, and from initializing it."""
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


def _fill_packing(
    base: PlainBase, read: CheckpointRows, weights: ShardedWeights, device: torch.device
) -> None:
    """Fill shares from rows of a 16-bit folder, or of one whose codes are decoded on the device."""
    base.device = device
    weights.fill(read, device)


def _dequantized(base: PlainBase, files: PrequantizedCheckpoint) -> set[str]:
    """Return the names of the parameters that are made from codes."""
    groups = base.layout.by_name.items()
    return {name for name, group in groups if any(map(files.is_dequantized, group.keys))}


def shards_model(config: Any) -> bool:
    """Whether a `DistributedConfig` asks for FSDP2 without expert parallelism."""
    sizes: Mapping[str, int] = {
        name: getattr(config, name, None) or 1 for name in ("tp_size", "pp_size", "ep_size")
    }
    return config is not None and config.dp_size > 1 and set(sizes.values()) == {1}


def _shard_by_plan(model: Any, config: Any) -> None:
    """Shard a model on meta as transformers does."""
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism

    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    with shards_integers():
        apply_fully_sharded_data_parallelism(model, model._mesh_manager, fsdp_plan, ep_plan)
