"""Describe one model type in plain JSON values: its expert weights, and what surrounds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_qlora import registry
from moe_qlora.layout import name_pattern

from .classes import MODELS, model_class
from .definitions import Definition, definition_of
from .tiny import TINY_EXPERTS, default_of, published_kwargs, tiny_kwargs

_ROUTER_NAMES = ("router", "gate")
_ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")


@dataclass(frozen=True)
class ExpertWeight:
    """One fused expert weight of a built model."""

    name: str
    owner: nn.Module
    owner_name: str
    definition: Definition
    shape: tuple[int, ...]
    aliases: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        """E: the first dimension, or what the module says where experts share it with rows."""
        if self.definition.packed_rows:
            return int(str(self.owner.moe_num_experts))
        return self.shape[0]

    @property
    def parameter(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in its name."""
        return tuple(int(part) for part in self.name.split(".") if part.isdigit())


def build(model_type: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Return the model on the meta device, tied as `from_pretrained` would tie it."""
    config_class = CONFIG_MAPPING[model_type]
    maker = model_class(config_class)
    if maker is None:
        raise LookupError(f"no model class for {model_type}")
    with torch.device("meta"), initialization.no_init_weights():
        model = maker._from_config(config_class(**kwargs))
    model.tie_weights()
    return model


def by_pattern(model: nn.Module) -> dict[str, list[ExpertWeight]]:
    """Return expert weights by name with `*` for numbers; tied ones once, with other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    weights: dict[int, ExpertWeight] = {}
    for owner_name, owner in model.named_modules():
        definition = definition_of(owner, MODELS)
        for parameter_name in definition.weights if definition else ():
            assert definition is not None
            parameter = owner.get_parameter(parameter_name)
            if id(parameter) in weights:
                continue
            first, *others = names[id(parameter)]
            weights[id(parameter)] = ExpertWeight(
                first, owner, owner_name, definition, tuple(parameter.shape), tuple(others)
            )
    grouped: dict[str, list[ExpertWeight]] = {}
    for weight in weights.values():
        grouped.setdefault(name_pattern(weight.name), []).append(weight)
    return grouped


def _role(weight: ExpertWeight) -> str:
    """Return what the weight does, by its own name or by the name of its owner."""
    if weight.parameter in weight.definition.roles:
        return weight.definition.roles[weight.parameter]
    by_name = {"gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    if weight.parameter in by_name:
        return by_name[weight.parameter]
    owner = weight.owner_name.rpartition(".")[2]
    if owner == "output_linear":
        return "down"
    # JetMoE: the input projection of its feed-forward experts holds both halves of a gated unit,
    # that of its attention experts is a plain query projection.
    return "up" if "attention" in weight.owner_name else "gate_up"


def _ranges(indices: list[int]) -> str:
    """Return `0-3,5` for [0, 1, 2, 3, 5]."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


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
    """Return the router nearest to an experts module: beside it, or beside what holds it."""
    parts = weight.owner_name.split(".")
    for length in range(len(parts) - 1, max(len(parts) - 4, -1), -1):
        prefix = ".".join(parts[:length])
        for name, child in model.get_submodule(prefix).named_children():
            if name in _ROUTER_NAMES or _ROUTER_CLASS.search(type(child).__name__):
                return {
                    "plain_linear": any(type(module) is nn.Linear for module in child.modules()),
                    "weight": name_pattern(_router_weight(child, f"{prefix}.{name}".lstrip("."))),
                }
    return None


def _router_weight(router: nn.Module, name: str) -> str:
    """Return the last Linear layer of a router, which scores the experts, or its parameter."""
    linears = [path for path, module in router.named_modules() if isinstance(module, nn.Linear)]
    if linears:
        return f"{name}.{linears[-1]}".rstrip(".")
    bare = [path for path, parameter in router.named_parameters() if parameter.dim() == 2]
    return f"{name}.{bare[0]}"


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


def _entry(
    pattern: str,
    tiny: list[ExpertWeight],
    published: list[ExpertWeight],
    model: PreTrainedModel,
    everything: list[ExpertWeight],
) -> dict[str, Any]:
    """Return what the file says of the weights of one name pattern.

    Its keys, where their names do not tell: `role` and `transposed`, as of `ExpertParam`;
    `interleaved`, gate and up rows by turns; `post_norm`, a norm after each expert; `packed_rows`,
    experts one below the other in a 2-D parameter; `dispatches`, through transformers' experts
    interface; `checkpoint`, the keys on disk, "per expert" or "fused"; `published` and `tiny`,
    where the weights are at these sizes.
    """
    first = tiny[0]
    flags, packed_rows = first.definition.flags, first.definition.packed_rows
    return {
        "aliases": sorted({name_pattern(alias) for alias in first.aliases}),
        "biases": list(first.definition.biases),
        "checkpoint": _checkpoint_keys(first, model, everything),
        "dispatches": first.definition.dispatches,
        "experts_class": first.definition.class_name,
        "gated": flags["has_gate"] and "attention" not in pattern,  # JetMoE's query experts
        "interleaved": not flags["is_concatenated"],
        "packed_rows": packed_rows,
        "pattern": pattern,
        "post_norm": flags["has_post_expert_norm"],
        "published": instances(published),
        "role": _role(first),
        "router": _router(first, model),
        "tiny": instances(tiny),
        # Rows of one expert are its intermediate features: out for the inputs, in for the output.
        "transposed": _role(first) == "down" if packed_rows else flags["is_transposed"],
    }


def describe(model_type: str) -> dict[str, Any] | None:
    """Return everything that a registry file says about a model type; None without experts.

    `checkpoints` of a file are kept: by hub id what the config.json of a well-known checkpoint says
    beyond the class's defaults, as far as memory and compute depend on it.

    Raises:
        Exception: Whatever transformers raises where a model cannot be built.
        LookupError: The model of published sizes has no such experts.
    """
    config_class = CONFIG_MAPPING[model_type]
    maker = model_class(config_class)
    if maker is None:
        return None
    kwargs = tiny_kwargs(config_class, default_of(config_class), TINY_EXPERTS)
    model = build(model_type, kwargs)
    tiny = by_pattern(model)
    if not tiny:
        return None
    full_kwargs = published_kwargs(config_class, default_of(config_class))
    published = by_pattern(build(model_type, full_kwargs))
    if missing := tiny.keys() - published.keys():
        raise LookupError(f"the default configuration has no {', '.join(sorted(missing))}")
    everything = [weight for group in tiny.values() for weight in group]
    known = model_type in registry.model_types()
    return {
        "class": maker.__name__,
        "checkpoints": dict(registry.load(model_type).checkpoints) if known else {},
        "experts": [
            _entry(pattern, weights, published[pattern], model, everything)
            for pattern, weights in tiny.items()
        ],
        "model_type": model_type,
        "published": {"config": full_kwargs},
        "tiny_config": kwargs,
        "transformers": transformers.__version__,
    }
