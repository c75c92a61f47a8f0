"""How often a user's data uses each expert, and each layer's most used ones."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..detection.detect import detect
from ..errors import ConfigError, DetectionError
from ..layout import unwrapped_name


def expert_use(
    model: nn.Module, batches: Iterable[Mapping[str, Any] | Tensor]
) -> dict[str, Tensor]:
    """Count how many top-k assignments each expert of each layer receives on some batches.

    The model runs as it is, packed or not, with adapters or without, in evaluation mode and without
    gradients; nothing of it is changed afterwards.

    Args:
        model: A model with fused experts, on one process.
        batches: Keyword arguments of the model's forward, such as a `DataLoader` yields them, or
            `input_ids` alone. Labels are left out, and so are tokens that a 2-D `attention_mask`
            of 0 hides.

    Returns:
        The counts `(E,)`, int64 on the CPU, by the name that each experts module has without
        adapters, in the model's order. `torch.stack(list(use.values()))` is `(L, E)` where all
        layers have as many experts.

    Raises:
        DetectionError: The model has no fused experts behind a router.
        ConfigError: There is no batch, or a layer's experts are not told which expert a token goes
            to: those of llama4, which compute all tokens for every expert.
    """
    unwrap = getattr(model, "get_base_model", None)
    base: Any = unwrap() if callable(unwrap) and hasattr(model, "base_model") else model
    routed = [module for module in detect(base).modules if module.router is not None]
    if not routed:
        raise DetectionError(
            f"{type(base).__name__} has no fused experts behind a router: there is no use to count."
        )
    counts = {
        unwrapped_name(module.name): torch.zeros(module.num_experts, dtype=torch.int64)
        for module in routed
    }
    seen: set[str] = set()
    hides: dict[str, Tensor | None] = {}
    hooks = []
    for module in routed:
        name = unwrapped_name(module.name)
        hook = partial(_count, name, counts, seen, hides)
        hooks.append(
            base.get_submodule(module.name).register_forward_pre_hook(hook, with_kwargs=True)
        )
    try:
        with _evaluating(model), torch.no_grad():
            empty = True
            for batch in batches:
                empty = False
                _run(model, batch, hides)
    finally:
        for handle in hooks:
            handle.remove()
    if empty:
        raise ConfigError("batches holds no batch, so that no expert was used; pass some data.")
    idle = [name for name in counts if name not in seen]
    if idle:
        raise ConfigError(
            f"The experts of {idle[0]} are not told which expert a token goes to, or did not run "
            "on these batches, so that their use cannot be counted."
        )
    return {name: each.cpu() for name, each in counts.items()}


def hot_experts(
    use: Mapping[str, Tensor | Sequence[int]], share: float = 0.25
) -> dict[str, list[int]]:
    """Return the most used experts of each layer, for LoRA on these alone.

    `get_peft_model(model, lora_config, experts=hot_experts(use))` trains them.

    Args:
        use: The result of `expert_use`: each layer's counts, one for each expert.
        share: The part of a layer's experts to return, above 0 and at most 1, rounded up.

    Returns:
        The experts' indices, ascending, by the names in `use`. Among equally used experts the first
        ones win.

    Raises:
        ConfigError: `share` is no such number.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share is {share!r}; expected a number above 0 and at most 1.")
    chosen = {}
    for name, each in use.items():
        counts = [int(count) for count in each]
        by_use = sorted(range(len(counts)), key=lambda expert: -counts[expert])
        chosen[name] = sorted(by_use[: math.ceil(share * len(counts))])
    return chosen


def _run(model: Any, batch: Mapping[str, Any] | Tensor, hides: dict[str, Tensor | None]) -> None:
    """Run the model on one batch, without labels and the logits of a loss."""
    if not isinstance(batch, (Mapping, Tensor)):
        raise ConfigError(
            f"batches holds the {type(batch).__name__} {reprlib.repr(batch)}; give a list of what "
            "a DataLoader yields, or of input_ids of shape (rows, tokens)."
        )
    inputs: dict[str, Any] = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    inputs.pop("labels", None)
    ids = inputs.get("input_ids")
    if ids is not None and not (isinstance(ids, Tensor) and ids.dim() == 2):
        kind = (
            f"tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        )
        raise ConfigError(
            f"A batch's input_ids are a {kind}; give tensors of shape (rows, tokens), as a "
            "DataLoader yields them, in a list of batches."
        )
    device = next(model.parameters()).device
    inputs = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in inputs.items()}
    mask = inputs.get("attention_mask")
    hides["mask"] = mask.reshape(-1) != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    unwrap = getattr(model, "get_base_model", None)
    taken = inspect.signature((unwrap() if callable(unwrap) else model).forward).parameters
    if "logits_to_keep" in taken:
        inputs.setdefault("logits_to_keep", 1)
    if "use_cache" in taken:
        inputs.setdefault("use_cache", False)
    model(**inputs)


def _count(
    name: str,
    counts: dict[str, Tensor],
    seen: set[str],
    hides: Mapping[str, Tensor | None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Add one call's assignments: the `(T, k)` integers among an experts module's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
            index, mask = value, hides.get("mask")
            if mask is not None and len(mask) == len(index):
                index = index[mask.to(index.device)]
            experts = len(counts[name])
            # Ids outside are of no expert: of identities (longcat), or of padded tokens.
            index = index[(index >= 0) & (index < experts)]
            counted = torch.bincount(index, minlength=experts)
            counts[name] = counts[name].to(counted.device) + counted
            seen.add(name)
            return


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode within a block, and restore each module's mode after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
