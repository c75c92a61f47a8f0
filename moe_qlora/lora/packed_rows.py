"""Packed rows: several conversations in one, whose positions begin again with each.

transformers keeps their attention apart where a model hands `position_ids` to its masks. Some do
not (gpt_oss, afmoe), nor does any where a mask of padding is given, or where it makes a cache, as
it does unless told not to; and layers with a state (Mamba, linear attention, short convolutions)
carry it on. Conversations then see each other, and nothing says so. `watch_packed_rows` lets packed
rows run by their positions alone, and refuses them where the model was found to mix them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError

_log = logging.getLogger(__name__)

SEPARATES = "_moe_qlora_separates_rows"
"""Entry of a prepared decoder stack's `__dict__`: whether it keeps packed rows apart by itself."""
_MIXES = "_moe_qlora_mixes_rows"
"""Entry of one that is watched: whether it mixes packed rows, as far as that was tried, by which
arguments beside positions tell it of them."""
OF_SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of packed rows beside positions, which say the same."""
_STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_TRIED = 8  # Tokens
_NOISE = 8  # Rounding of a dtype


def decoder_stacks(model: nn.Module) -> list[Any]:
    """Return the modules that own decoder layers and take token ids."""
    found = [
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) for child in module.children())
        and {"input_ids", "position_ids"} <= set(parameters_of(module))
    ]
    # A model with a list of heads is around one.
    return [one for one in found if not any(x in found for x in one.modules() if x is not one)]


def parameters_of(stack: nn.Module) -> list[str]:
    """Return the names of a stack's arguments."""
    forward = type(stack).forward
    found = inspect.signature(forward).parameters if callable(forward) else ()
    return [name for name in found if name != "self"]


def watch_packed_rows(model: nn.Module) -> ExitStack:
    """Keep the conversations of packed rows apart, or refuse them where this model mixes them.

    Returns what stops that when it is closed.
    """
    undo = ExitStack()
    for stack in decoder_stacks(model):
        if _MIXES not in vars(stack):
            vars(stack)[_MIXES] = {}
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


def tokens_of(given: Mapping[str, Any]) -> torch.Size | None:
    """Return `(B, T)` of a call's arguments."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    found = ids if isinstance(ids, Tensor) else embeds
    return found.shape[:2] if isinstance(found, Tensor) else None


def starts_of(real: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """Return which tokens `(B, T)` begin a sequence.

    The first one of a row, and those at which positions begin again, or ids of sequences change,
    which some collators give as the mask.
    """
    before = functional.pad(real[:, :-1], (1, 0))  # Whether the token before is real
    starts = real & (real.cumsum(1) == 1)
    if positions is not None:
        jumps = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
        starts = starts | (real & torch.where(before, jumps, positions == 0))
    if mask is not None and mask.dtype != torch.bool:
        changes = functional.pad(mask[:, 1:] != mask[:, :-1], (1, 0))
        starts = starts | (real & before & changes)
    return starts


def packed_starts(given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return which tokens `(B, T)` are real, and which begin a sequence; None of plain rows."""
    tokens, mask, positions = tokens_of(given), given.get("attention_mask"), _positions(given)
    mask = mask if isinstance(mask, Tensor) and mask.shape == tokens else None
    if tokens is None or (mask is None and positions is None):
        return None
    real = positions >= 0 if mask is None else mask != 0
    positions = None if positions is None else positions.to(real.device).expand(tokens)
    starts = starts_of(real.expand(tokens), mask, positions)
    return (real, starts) if bool((starts.sum(1) > 1).any()) else None


def _positions(given: Mapping[str, Any]) -> Tensor | None:
    """Return positions `(B, T)` of the text, also where a model that sees has several axes."""
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() == 2:
        return positions
    if len(positions) > 3:
        return positions[0]
    # Time stands still within an image, and goes back with the next conversation.
    columns = torch.arange(positions.shape[-1], device=positions.device)
    falls = functional.pad(positions[0, :, 1:] < positions[0, :, :-1], (1, 0))
    return columns - torch.where(falls, columns, 0).cummax(1).values


def kept_apart(stack: Any, given: dict[str, Any], run: Any = None) -> dict[str, Any]:
    """Return arguments by which transformers keeps packed rows apart; those of other rows stay.

    Args:
        stack: A decoder stack.
        given: Arguments of its forward by name.
        run: Its forward, if that is not what a call of it runs.

    Raises:
        ConfigError: It mixes them.
    """
    packed = None if given.get("past_key_values") is not None else packed_starts(given)
    if packed is None:
        return given
    real, starts = packed
    told = tuple(name for name in OF_SEGMENTS if given.get(name) is not None)
    tried: dict[Any, bool] = vars(stack).setdefault(_MIXES, {})
    positions, state = given.get("position_ids"), None if "seq_idx" in told else state_of(stack)
    if told not in tried:
        tried[told] = state is not None or _mixes(stack, given, told, run or stack)
    of_axes = positions is not None and positions.dim() > 2
    if given.get("use_cache"):
        reason = "transformers masks no packed row where there is a cache (use_cache=True)"
    elif of_axes and len(positions) < 4:
        reason = "its position_ids have several axes, and none of the text"
    elif tried[told] or ("flash" in str(stack.config._attn_implementation) and len(real) > 1):
        reason = state or "transformers masks this model without their positions"
    elif _sees_across(given.get("attention_mask"), starts):
        reason = "the attention_mask that was made for them does not keep them apart"
    elif not isinstance(given.get("attention_mask"), Tensor | None):
        return given | {"use_cache": False}
    else:
        columns = torch.arange(real.shape[1], device=real.device)
        within = columns - torch.where(starts, columns, 0).cummax(1).values
        # Padding is a sequence for each token. With a mask, positions would not be looked at.
        positions = positions if of_axes else torch.where(real, within, 0)
        return given | {"position_ids": positions, "attention_mask": None, "use_cache": False}
    raise ConfigError(
        f"{type(stack).__name__}: position_ids begin again within a row, as packed conversations "
        f"have them, and they would see each other: {reason}; prepare_training keeps some models' "
        "apart. Train one conversation a row (packing=False, padding_free=False)."
    )


def _sees_across(mask: Any, starts: Tensor) -> bool:
    """Whether a ready mask `(B, 1, T, T)` lets the first token of a sequence see the one before."""
    for each in mask.values() if isinstance(mask, Mapping) else (mask,):
        if isinstance(mask, Mapping) and each is None:
            return True
        if isinstance(each, Tensor) and each.dim() == 4:
            seen = each[:, 0].diagonal(-1, 1, 2)
            seen = seen if seen.dtype == torch.bool else seen == 0
            if bool((seen & starts[:, 1:]).any()):
                return True
    return False


def _look(
    stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling() or vars(stack).get(SEPARATES):
        return None
    if SEPARATES not in vars(stack) and stack.training and next(stack.parameters()).is_cuda:
        _suggest_preparing()
    return (), kept_apart(stack, kwargs | dict(zip(parameters_of(stack), args, strict=False)))


@cache
def _suggest_preparing() -> None:
    """Log once that eager, checkpointed steps wait for Python."""
    _log.warning(
        "moe_qlora.prepare_training(model, batch_size=..., seq_len=...) before training makes its "
        "steps several times as fast: compiled layers, CUDA graphs, no computing of padding."
    )


@torch.no_grad()
def _mixes(stack: Any, given: Mapping[str, Any], told: tuple[str, ...], run: Any) -> bool:
    """Whether a row's last token, at position 0, depends on those before."""
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    numbers = torch.arange(_TRIED, device=given[name].device)
    last = numbers == _TRIED - 1
    bounds = numbers.new_tensor([0, _TRIED - 1, _TRIED]).int()
    says = {"cu": bounds, "ma": _TRIED - 1, "se": last[None].int()}
    known = {each: says[each[:2]] for each in told}
    rows = [torch.where(last, 5, numbers + first)[None] for first in (6, 6 + _TRIED)]
    training = [module for module in stack.modules() if module.training]
    held, tried = vars(stack), vars(stack)[_MIXES]
    held[_MIXES] = {told: False}
    stack.eval()
    try:
        rows = rows if name == "input_ids" else list(map(stack.get_input_embeddings(), rows))
        positions = torch.where(last, 0, numbers)[None]
        first, second = (
            run(**{name: row}, position_ids=positions, use_cache=False, **known).last_hidden_state[
                0, -1
            ]
            for row in rows
        )
    finally:
        held[_MIXES] = tried
        for module in training:
            module.training = True
    apart = (first - second).abs().max() / first.abs().max()
    return bool(apart > _NOISE * torch.finfo(first.dtype).eps)
