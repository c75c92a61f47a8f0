"""Checks that all ranks were given the same, before they read.

Ranks exchange tensors by shape alone: without the check, gathered codes are decoded with another
folder's statistics, and sums mix two scalings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import distributed, nn

from ..errors import ConfigError, MoeQloraError
from ..packing.linear import linear_kind
from ..packing.parametrize import is_packed_linear, iter_packed, read_packed
from ..packing.settings import CodecSettings

_SAMPLE = 512  # values of a tensor that are compared
_WEIGHTS = 8  # packed weights whose codes and statistics are sampled

Facts = Callable[[], Mapping[str, Any]]


def check_agreement(what: str, facts: Facts, mesh: Any = None, group: Any = None) -> None:
    """Raise on every rank where one was given something other than the first.

    All ranks of the mesh or group (None: all) must call it; without a process group it does
    nothing. `facts` returns what must be equal, by the caller's names for it, a configuration
    compared field by field; its error on one rank is raised on all. `what` begins the sentence of
    the `ConfigError`, which names the rank, the setting and both values.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    error: MoeQloraError | None = None
    known: dict[int, dict[str, str] | str] = {}
    try:
        known[distributed.get_rank()] = dict(_settings(facts()))
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


def _settings(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield values by name as text; of a configuration, each field under its full name."""
    for name, value in facts.items():
        fields = value.to_dict() if hasattr(value, "to_dict") else value
        if isinstance(fields, Mapping):
            # Each rank may read a copy of the base of its own.
            inner = {k: one for k, one in fields.items() if k != "base_model_name_or_path"}
            yield from ((f"{name}.{field}", _text(one)) for field, one in inner.items())
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    value = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
    return f"{value!r:.200}"


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
