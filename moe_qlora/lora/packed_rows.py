"""Packed rows: several conversations in one, whose positions begin again with each.

transformers keeps their attention apart where a model hands `position_ids` to its masks. Some do
not (gpt_oss, afmoe), nor is there a mask where a cache is made, as models do in training unless
told not to; and layers with a state (Mamba, linear attention, short convolutions) carry it on.
Conversations then see each other, and nothing says so. `watch_packed_rows` lets rows with positions
train without a cache, and refuses packed ones where the model was found to mix them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

SEPARATES = "_moe_qlora_separates_rows"
"""Entry of a decoder stack's `__dict__` where it runs packed rows rightly by itself."""
CACHES = ("past_key_values", "cache")
"""A key-value cache among a stack's arguments: until transformers 5.23, and from 5.24 on."""
_MIXES = "_moe_qlora_mixes_rows"
"""Entry of one that is watched: whether it mixes packed rows; None until that was tried."""
_STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_TRIED = 8  # Tokens
_NOISE = 8  # Rounding of a dtype


def decoder_stacks(model: nn.Module) -> list[Any]:
    """Return the modules that own decoder layers and take token ids."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    owners = {
        name.rpartition(".")[0].rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }
    stacks = [model.get_submodule(owner) for owner in sorted(owners)]
    return [stack for stack in stacks if "input_ids" in parameters_of(stack)]


def parameters_of(stack: nn.Module) -> list[str]:
    """Return the names of a stack's arguments."""
    return [name for name in inspect.signature(type(stack).forward).parameters if name != "self"]


def watch_packed_rows(model: nn.Module) -> ExitStack:
    """Refuse packed rows in training, from the first on, where this model would mix them.

    Returns what stops that when it is closed.
    """
    undo = ExitStack()
    for stack in decoder_stacks(model):
        if _MIXES not in vars(stack) and "position_ids" in parameters_of(stack):
            vars(stack)[_MIXES] = None
            undo.callback(vars(stack).pop, _MIXES, None)
            undo.callback(stack.register_forward_pre_hook(_look, with_kwargs=True).remove)
    return undo


def state_of(stack: Any) -> str | None:
    """Return which of a stack's layers carry a state from token to token, in words, or None."""
    kinds = set(getattr(stack.config, "layer_types", None) or ()) - _STATELESS
    if stateful := sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind):
        return f"it has layers of {', '.join(stateful)}"
    for name, module in stack.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"its {name} carries a state from token to token"
    return None


def _look(
    stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    held = vars(stack)
    if torch.compiler.is_compiling() or not (stack.training and torch.is_grad_enabled()):
        return None
    given = dict(zip(parameters_of(stack), args, strict=False)) | dict(kwargs)
    positions = given.get("position_ids")
    known = "seq_idx" in given or SEPARATES in held
    if known or not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    if held[_MIXES] is None:
        held[_MIXES] = state_of(stack) is not None or _mixes(stack, given)
    if held[_MIXES] and bool((positions[:, 1:] < positions[:, :-1]).any()):
        reason = state_of(stack) or "transformers masks this model without their positions"
        raise ConfigError(
            f"{type(stack).__name__}: position_ids begin again within a row, as packed "
            f"conversations have them, and they would see each other: {reason}; prepare_training "
            "keeps some models' apart. Train one conversation a row (packing=False, "
            "padding_free=False)."
        )
    asks = any(given.get(name) is not None for name in ("use_cache", *CACHES))
    return None if asks else (args, kwargs | {"use_cache": False})


@torch.no_grad()
def _mixes(stack: Any, given: Mapping[str, Any]) -> bool:
    """Whether a row's last token, at position 0, depends on those before."""
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    row = given[name][:1, :_TRIED]
    if row.shape[1] < 2:
        return False
    positions = torch.arange(row.shape[1], device=row.device)[None]
    positions[:, -1] = 0
    other = row.clone()
    others = other[:, :-1]
    others.copy_(torch.where(others == 7, 8, 7) if name == "input_ids" else -others)
    training = [module for module in stack.modules() if module.training]
    stack.eval()
    try:
        first, second = (
            stack(**{name: each}, position_ids=positions, use_cache=False).last_hidden_state[0, -1]
            for each in (row, other)
        )
    finally:
        for module in training:
            module.training = True
    apart = (first - second).abs().max() / first.abs().max()
    return bool(apart > _NOISE * torch.finfo(first.dtype).eps)
