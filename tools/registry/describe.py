"""Describe one model type in plain JSON values: its expert weights, and what surrounds them."""

import re
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_qlora import registry
from moe_qlora.layout import name_pattern

from .classes import Definition, definition_of, model_class
from .tiny import TINY_EXPERTS, default_of, tiny_kwargs

_ROUTER = re.compile(r"^(router|gate)$|(Router|Gating|Gate)$")  # a name, or the end of a class
_ROLES = {"gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True)
class ExpertWeight:
    """One fused expert weight of a built model, by its first name."""

    name: str
    owner: nn.Module
    owner_name: str
    definition: Definition
    shape: tuple[int, ...]
    aliases: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        """E: the first dimension, or what the module says where experts share it with rows."""
        rows = self.definition.packed_rows
        return int(str(self.owner.moe_num_experts)) if rows else self.shape[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its name."""
        return tuple(int(part) for part in self.name.split(".") if part.isdigit())

    @property
    def role(self) -> str:
        """What it does, by its own name or by the name of its owner."""
        leaf, owner = self.name.rpartition(".")[2], self.owner_name.rpartition(".")[2]
        if found := {**_ROLES, **self.definition.roles}.get(leaf):
            return found
        # JetMoE: the input projection of its feed-forward experts holds both halves of a gated
        # unit, that of its attention experts is a plain query projection.
        entry = "up" if "attention" in self.owner_name else "gate_up"
        return "down" if owner == "output_linear" else entry


def by_pattern(maker: Any, config: Any) -> tuple[PreTrainedModel, dict[str, list[ExpertWeight]]]:
    """Build a model on meta, tied as `from_pretrained` would tie it; return it and its weights.

    Expert weights by name with `*` for numbers; tied ones once, with their other names.
    """
    with torch.device("meta"), initialization.no_init_weights():
        model = maker._from_config(config)
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    seen: set[int] = set()
    grouped: dict[str, list[ExpertWeight]] = {}
    for where, owner in model.named_modules():
        definition = definition_of(owner)
        for leaf in definition.weights if definition else ():
            assert definition is not None
            parameter = owner.get_parameter(leaf)
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            first, *others = names[id(parameter)]
            shape = tuple(parameter.shape)
            weight = ExpertWeight(first, owner, where, definition, shape, tuple(others))
            grouped.setdefault(name_pattern(first), []).append(weight)
    return model, grouped


def _ranges(indices: list[int]) -> str:
    """Return `0-3,5` for [0, 1, 2, 3, 5]."""
    pairs = groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in pairs]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def instances(weights: list[ExpertWeight]) -> dict[str, Any]:
    """Return where the weights of one pattern are, and how large: shape -> the numbers at `*`."""
    groups: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for weight in weights:
        groups.setdefault((weight.shape, weight.num_experts), []).append(weight.numbers)
    found: list[dict[str, Any]] = []
    for (shape, experts), at in groups.items():
        places = ",".join(".".join(map(str, index)) for index in at)
        places = _ranges([one for (one,) in at]) if all(len(i) == 1 for i in at) else places
        found.append({"experts": experts, "shape": list(shape), "at": places})
    return {"count": len(weights), "groups": found}


def _router(weight: ExpertWeight, model: nn.Module) -> dict[str, Any] | None:
    """Return the router nearest to an experts module: beside it, or beside what holds it.

    Of it the last Linear layer, which scores the experts, or its parameter.
    """
    parts = weight.owner_name.split(".")
    for length in range(len(parts) - 1, max(len(parts) - 4, -1), -1):
        prefix = ".".join(parts[:length])
        for name, child in model.get_submodule(prefix).named_children():
            if _ROUTER.search(name) or _ROUTER.search(type(child).__name__):
                linears = [path for path, one in child.named_modules() if type(one) is nn.Linear]
                inner = [p for p, module in child.named_modules() if isinstance(module, nn.Linear)]
                inner = inner or [p for p, one in child.named_parameters() if one.dim() == 2][:1]
                path = f"{prefix}.{name}.{inner[-1]}".strip(".")
                return {"plain_linear": bool(linears), "weight": name_pattern(path)}
    return None


def _checkpoint_keys(
    weight: ExpertWeight, model: PreTrainedModel, siblings: list[ExpertWeight]
) -> dict[str, Any]:
    """Return the keys of the weight in a checkpoint, as `save_pretrained` would write them."""
    # Of tied names a checkpoint holds the one that the others are tied to.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    block = [s for s in siblings if s.numbers == weight.numbers]
    for group in ([weight], block):
        state = {tied.get(s.name, s.name): torch.empty(s.shape, device="meta") for s in group}
        try:
            written = revert_weight_conversion(model, state)
        except Exception:  # noqa: BLE001 - some conversions want all weights of a block at once
            continue
        keys = sorted({name_pattern(key) for key in written})
        return {"keys": keys, "layout": "per expert" if len(written) > len(keys) else "fused"}
    return {"keys": [], "layout": "unknown"}


def describe(model_type: str) -> dict[str, Any] | None:
    """Return everything that a registry file says about a model type; None without experts.

    Of the weights of a pattern, where the names of the keys do not tell: `role` and `transposed`,
    as of `ExpertParam`; `packed_rows`, experts one below the other in a 2-D parameter;
    `dispatches`, through transformers' experts interface; `checkpoint`, the keys on disk, "per
    expert" or "fused"; `published` and `tiny`, where the weights are at these sizes. A file's
    configurations are kept, so that they can be mended by hand: `tiny_config`; `published`, what
    the class's defaults lack; and `checkpoints`, by hub id what the config.json of a well-known
    checkpoint says beyond the defaults, as far as memory and compute depend on it.

    Raises:
        Exception: Whatever transformers raises where a model cannot be built.
        LookupError: The model of published sizes has no such experts.
    """
    config_class = CONFIG_MAPPING[model_type]
    maker = model_class(config_class)
    if maker is None:
        return None
    entry = registry.load(model_type) if model_type in registry.model_types() else None
    kwargs: Any = tiny_kwargs(config_class, default_of(config_class), TINY_EXPERTS)
    kwargs, full_kwargs = (entry.tiny_config, entry.published_config) if entry else (kwargs, {})
    model, tiny = by_pattern(maker, config_class(**deepcopy(kwargs)))
    if not tiny:
        return None
    _, published = by_pattern(maker, config_class(**deepcopy(full_kwargs)))
    if missing := tiny.keys() - published.keys():
        raise LookupError(f"the default configuration has no {', '.join(sorted(missing))}")
    everything = [weight for group in tiny.values() for weight in group]
    experts = [
        {
            "aliases": sorted({name_pattern(alias) for alias in first.aliases}),
            "biases": list(known.biases),
            "checkpoint": _checkpoint_keys(first, model, everything),
            "dispatches": known.dispatches,
            "packed_rows": known.packed_rows,
            "pattern": pattern,
            "published": instances(published[pattern]),
            "role": first.role,
            "router": _router(first, model),
            "tiny": instances(weights),
            # An expert's rows are its intermediate features: out of the inputs, in of the output.
            "transposed": first.role == "down" if known.packed_rows else known.transposed,
        }
        for pattern, weights in tiny.items()
        for first, known in [(weights[0], weights[0].definition)]
    ]
    return {
        "class": maker.__name__,
        "checkpoints": entry.checkpoints if entry else {},
        "experts": experts,
        "model_type": model_type,
        "published": {"config": full_kwargs},
        "tiny_config": kwargs,
        "transformers": transformers.__version__,
    }
