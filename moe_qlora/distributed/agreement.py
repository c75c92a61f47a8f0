"""Checks that all ranks were given the same, before they read.

Ranks exchange tensors by shape alone. Without the check a rank with another folder, codec or LoRA
setting goes unnoticed: gathered codes are decoded with this rank's statistics, and sums mix two
scalings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, distributed, nn

from ..errors import ConfigError, MoeQloraError
from ..packing.linear import linear_kind
from ..packing.parametrize import is_packed_linear, iter_packed, read_packed
from ..packing.settings import CodecSettings

_SAMPLE = 512  # values of a tensor that are compared
_WEIGHTS = 8  # packed weights whose codes and statistics are sampled

Facts = Callable[[], Mapping[str, Any]]


def check_agreement(what: str, facts: Facts, mesh: Any = None, group: Any = None) -> None:
    """Raise on every rank where one was given something other than the first.

    All ranks of the mesh or group must call it; where no process group is initialized, it does
    nothing.

    Args:
        what: Begins the sentence: "load_sharded".
        facts: Returns the values that must be equal, by the caller's names for them; a
            configuration is compared field by field. An error of it on one rank is raised on all.
        mesh: A `DeviceMesh` of the ranks; None is those of the group.
        group: A process group; None is all ranks.

    Raises:
        ConfigError: It names the rank, the setting and both values.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    error: MoeQloraError | None = None
    known: dict[int, dict[str, str] | str] = {}
    try:
        parts = [settings_facts(name, one) for name, one in facts().items()]
        mine = {name: _text(one) for part in parts for name, one in part.items()}
        known[distributed.get_rank()] = mine
    except MoeQloraError as raised:
        error, known[distributed.get_rank()] = raised, str(raised)
    groups = [group] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for group in groups:  # after the last, each rank has the facts of all
        everyone: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(everyone, known, group=group)
        known = {rank: given for one in everyone for rank, given in one.items()}
    if error is not None:
        raise error
    told: dict[int, dict[str, str]] = {}
    for rank, given in sorted(known.items()):
        if isinstance(given, str):
            raise ConfigError(f"{what}: rank {rank} failed: {given}")
        told[rank] = given
    first, expected = min(told.items())
    for rank, given in told.items():
        for name in {**expected, **given}:
            here, there = given.get(name, "nothing"), expected.get(name, "nothing")
            if here != there:
                raise ConfigError(
                    f"{what}: rank {rank} has {name} {here}, and rank {first} has {there}: give "
                    "all ranks the same."
                )


def settings_facts(name: str, value: Any) -> dict[str, Any]:
    """Return a value under its name, for a configuration each field under its full name.

    Paths are left out: each rank may read a copy of its own.
    """
    if not isinstance(value, Mapping) and not hasattr(value, "to_dict"):
        return {name: value}
    fields = value if isinstance(value, Mapping) else value.to_dict()
    return {
        f"{name}.{field}": one
        for field, one in fields.items()
        if field != "base_model_name_or_path"
    }


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
        facts[f"{name} of the content"] = _digest(weight.flat_codes, weight.absmax, statistics)
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


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        digest.update(flat[:: max(len(flat) // _SAMPLE, 1)].cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _text(value: Any) -> str:
    """Return a value as comparable text: sets in order, objects by their content."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    return f"{value!r:.200}"
