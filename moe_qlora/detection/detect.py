"""Detect the expert parameters of a model: every step in order, nn.Module -> ModelLayout."""

from collections.abc import Sequence
from itertools import groupby

from torch import nn

from ..errors import DetectionError
from ..layout import ExpertsModule, LinearExperts, ModelLayout, RejectedParam, Router
from .rules import Classification, classify
from .structure import RouterIndex, chains, dispatches, is_list
from .tree import Leaf, Node, build_tree


def detect(model: nn.Module) -> ModelLayout:
    """Find every parameter that holds the fused weights of a Mixture-of-Experts layer.

    Only structure decides: the shapes of parameters and the router beside them; attributes of
    transformers' experts interface confirm it. The model is not run, and may live on meta. A
    `DetectionError` where it is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise DetectionError(f"The model is a {type(model).__name__}: give a built nn.Module.")
    root, leaves = build_tree(model)
    index = RouterIndex()
    classified = classify(leaves, index)
    linear_experts, linear_routers = _find_linear_experts(root, index)
    modules = _modules(classified)
    routers = [module.router for module in modules if module.router is not None]
    routers += [_router(leaf, leaf.shape[0]) for leaf in linear_routers]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return ModelLayout(
        experts=tuple(item.expert for item in classified if item.expert is not None),
        rejected=tuple(
            RejectedParam(item.leaf.name, item.leaf.shape, item.rejection, tuple(item.leaf.aliases))
            for item in classified
            if item.expert is None and len(item.leaf.shape) >= 3
        ),
        modules=modules,
        linear_experts=linear_experts,
        routers=tuple({router.name: router for router in routers}.values()),
        model_type=model_type if isinstance(model_type, str) and model_type else None,
    )


def _router(leaf: Leaf, num_choices: int) -> Router:
    plain = leaf.kind == "linear" and type(leaf.node.module) is nn.Linear
    return Router(leaf.known_as, num_choices, plain, leaf.packed is not None)


def _modules(classified: Sequence[Classification]) -> tuple[ExpertsModule, ...]:
    modules = []
    accepted = [item for item in classified if item.expert is not None]
    for node, group in groupby(accepted, lambda item: item.leaf.node):
        items = list(group)
        params = tuple(item.expert for item in items if item.expert is not None)
        router = next(filter(None, (item.router for item in items)), None)
        largest = max(param.num_experts for param in params)
        choosing = None if router is None else _router(router.leaf, router.num_choices)
        form = largest, params, choosing, dispatches(node.module)
        modules.append(ExpertsModule(node.name, type(node.module).__name__, *form))
    return tuple(modules)


def _find_linear_experts(
    root: Node, index: RouterIndex
) -> tuple[tuple[LinearExperts, ...], tuple[Leaf, ...]]:
    """Return lists of E equal modules whose Linears chain, next to a router; and the routers."""
    experts: list[LinearExperts] = []
    routers: list[Leaf] = []
    for node in root.subtree():
        # A dropout or an activation may stand in the list too.
        items = [child for child in node.children if any(n.leaves for n in child.subtree())]
        is_listing = is_list(node) or not (node.leaves or isinstance(node.module, nn.Sequential))
        if len(items) < 2 or node.parent is None or not is_listing:
            continue
        leaves = [[leaf for part in item.subtree() for leaf in part.leaves] for item in items]
        shapes = ([leaf.shape for leaf in below] for below in leaves)
        if len({(type(item.module), *of) for item, of in zip(items, shapes, strict=True)}) > 1:
            continue
        linears = [leaf for leaf in leaves[0] if leaf.kind == "linear"]
        if not chains([leaf.shape for leaf in linears]):
            continue
        above = [n for n in node.ancestors() if n is not node and not is_list(n)]
        near = (leaf for block in above[:2] for leaf in index.visible(block))
        scoring = (leaf for leaf in near if leaf.shape[0] == len(items))
        router = next((leaf for leaf in scoring if not node.contains(leaf.node)), None)
        if router is None:
            continue
        prefix = len(items[0].name) + 1
        names = tuple(leaf.node.name[prefix:] for leaf in linears)
        experts.append(LinearExperts(node.name, len(items), names))
        routers.append(router)
    return tuple(experts), tuple(routers)
