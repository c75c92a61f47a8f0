"""All steps of detection in order: nn.Module -> ModelLayout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..layout import ExpertParam, ExpertsModule, ModelLayout, RejectedParam, Router
from .linear import find_linear_experts
from .routers import RouterIndex
from .rules import Judge, Verdict
from .tree import Leaf, build_tree


def detect_layout(model: nn.Module) -> ModelLayout:
    """See `moe_qlora.detect`."""
    root, leaves = build_tree(model)
    index = RouterIndex()
    verdicts = Judge(leaves, index).judge()
    linear_experts, linear_routers = find_linear_experts(root, index)
    experts = tuple(_expert(v) for v in verdicts if v.accepted)
    rejected = tuple(
        RejectedParam(v.leaf.name, v.leaf.shape, v.reason, tuple(v.leaf.aliases))
        for v in verdicts
        if not v.accepted and len(v.leaf.shape) >= 3
    )
    modules = _modules([v for v in verdicts if v.accepted], experts)
    routers: dict[str, Router] = {}
    for module in modules:
        if module.router is not None:
            routers.setdefault(module.router.name, module.router)
    for leaf in linear_routers:
        router = _router(leaf, leaf.shape[0])
        routers.setdefault(router.name, router)
    for node in root.subtree():
        for leaf in node.leaves:
            # The tree refers to itself: without this it would hold the weights until a collection.
            del leaf.tensor
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    return ModelLayout(
        experts=experts,
        rejected=rejected,
        modules=modules,
        linear_experts=linear_experts,
        routers=tuple(routers.values()),
        model_type=model_type if isinstance(model_type, str) and model_type else None,
    )


def _expert(verdict: Verdict) -> ExpertParam:
    leaf = verdict.leaf
    return ExpertParam(
        name=leaf.name,
        module_name=leaf.node.name,
        parameter_name=leaf.attribute,
        shape=leaf.shape,
        num_experts=verdict.num_experts,
        in_features=verdict.in_features,
        out_features=verdict.out_features,
        transposed=verdict.transposed,
        role=verdict.role,
        dtype=leaf.dtype,
        nbytes=leaf.nbytes,
        evidence=verdict.reason,
        aliases=tuple(leaf.aliases),
        packed=leaf.packed,
        orientation_evidence=verdict.orientation_reason,
    )


def _router(leaf: Leaf, choices: int) -> Router:
    linear = leaf.kind == "linear"
    return Router(
        name=leaf.node.name if linear else leaf.name,
        num_choices=choices,
        plain_linear=linear and type(leaf.node.module) is nn.Linear,
        packed=leaf.packed is not None,
    )


@dataclass(slots=True)
class _Owner:
    verdicts: list[Verdict] = field(default_factory=list)
    params: list[ExpertParam] = field(default_factory=list)


def _modules(
    accepted: Sequence[Verdict], experts: Sequence[ExpertParam]
) -> tuple[ExpertsModule, ...]:
    owners: dict[str, _Owner] = defaultdict(_Owner)
    for verdict, param in zip(accepted, experts, strict=True):
        owners[param.module_name].verdicts.append(verdict)
        owners[param.module_name].params.append(param)
    found = []
    for name, owner in owners.items():
        node = owner.verdicts[0].leaf.node
        router = next((v.router for v in owner.verdicts if v.router is not None), None)
        num_experts = max(p.num_experts for p in owner.params)
        counts = {p.num_experts for p in owner.params}
        widths = {size for p in owner.params for size in p.shape[1:]}
        biases = tuple(
            leaf.attribute
            for leaf in node.leaves
            if leaf.kind == "bare" and len(leaf.shape) == 2 and leaf.shape[0] in counts
            if leaf.shape[1] in widths and (router is None or leaf is not router.leaf)
            if all(leaf is not v.leaf for v in owner.verdicts)
        )
        found.append(
            ExpertsModule(
                name=name,
                class_name=type(node.module).__name__,
                num_experts=num_experts,
                parameters=tuple(owner.params),
                router=_router(router.leaf, router.choices) if router is not None else None,
                dispatches=dispatches(node.module),
                bias_names=biases,
            )
        )
    return tuple(found)


def dispatches(module: nn.Module) -> bool:
    """Whether the module's forward goes through transformers' experts interface.

    `use_experts_implementation` leaves its arguments on each instance, and a gate method on the
    class (transformers/integrations/moe.py); no other class has them all.
    """
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "config")
    return all(hasattr(module, name) for name in names)


def detect(model: nn.Module) -> ModelLayout:
    """Find every parameter that stacks the weight matrices of a Mixture-of-Experts layer.

    Raises:
        DetectionError: `model` is no `nn.Module`.
    """
    from torch import nn

    from ..errors import DetectionError

    if not isinstance(model, nn.Module):
        raise DetectionError(f"The model is a {type(model).__name__}: give a built nn.Module.")
    return detect_layout(model)
