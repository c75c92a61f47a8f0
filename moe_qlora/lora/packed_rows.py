"""Packed rows: several conversations in one, whose positions begin again with each.

transformers keeps their attention apart where a model hands `position_ids` to its masks. Some do
not (gpt_oss, afmoe), nor does any with a mask of padding or a cache, which it makes unless told not
to; and layers with a state (Mamba, linear attention, short convolutions) carry it on. Conversations
then see each other in silence. `watch_packed_rows` lets packed rows run by their positions alone,
and refuses them where the model was found to mix them.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError

# Entries of a decoder stack's `__dict__`: whether it keeps packed rows apart itself, and whether it
# was found to mix them, by which arguments beside positions tell it of them.
SEPARATES, _MIXES = "_moe_qlora_separates_rows", "_moe_qlora_mixes_rows"
# Its arguments: caches (transformers 5.23, 5.24), segments (flash attention, Mamba), and positions.
CACHES = ("past_key_values", "cache")
OF_SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
PLACES = ("attention_mask", "position_ids")
_STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_TRIED = 8  # Tokens
_NOISE = 8  # Rounding of a dtype


def decoder_stacks(model: nn.Module) -> list[Any]:
    """Return the modules that own decoder layers and take token ids."""
    owners = [m for m in model.modules() if any(isinstance(c, nn.ModuleList) for c in m.children())]
    found = [m for m in owners if {"input_ids", "position_ids"} <= set(parameters_of(m))]
    # A model with a list of heads is around one.
    return [one for one in found if not any(x in found for x in one.modules() if x is not one)]


def parameters_of(stack: nn.Module) -> list[str]:
    """Return the names of a stack's arguments."""
    forward = type(stack).forward
    return [*inspect.signature(forward).parameters][1:] if callable(forward) else []


def watch_packed_rows(model: nn.Module) -> ExitStack:
    """Keep packed conversations apart, or refuse them where this model mixes them, until closed."""
    undo = ExitStack()
    for stack in decoder_stacks(model):
        if _MIXES not in vars(stack):
            vars(stack)[_MIXES] = {}
            undo.callback(vars(stack).pop, _MIXES, None)
            undo.callback(stack.register_forward_pre_hook(_look, with_kwargs=True).remove)
    return undo


def state_of(stack: Any) -> str | None:
    """Return half a sentence on layers that carry a state from token to token, or None."""
    kinds = set(getattr(stack.config, "layer_types", None) or ()) - _STATELESS
    if stateful := sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind):
        return f"it has layers of {', '.join(stateful)}"
    for name, module in stack.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"its {name} carries a state from token to token"
    return None


def tokens_of(given: Mapping[str, Any]) -> Any:
    """Return a call's ids `(B, T)` or embeddings `(B, T, H)`, or None."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def sequences_of(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return masks `(B, T)` of a call's real tokens, and of the first tokens of sequences.

    A sequence begins with a row, where positions begin again, and where the ids of sequences that
    some collators give as the mask change.
    """
    tokens, (mask, positions) = tokens_of(given), map(given.get, PLACES)
    shape: Any = tokens.shape[:2]
    theirs = mask if isinstance(mask, Tensor) and mask.shape == shape else None
    mask = tokens.new_ones(shape, dtype=torch.bool) if theirs is None else theirs.to(tokens.device)
    real = mask != 0
    before = functional.pad(real[:, :-1], (1, 0))  # Whether the token before is real
    starts = real & (real.cumsum(1) == 1)
    if positions is not None:
        seen, positions = positions.dim() > 2, positions.to(tokens.device)
        # Of several axes the first is the text's, or time, which stands still within an image.
        first = (positions[0] if seen else positions).expand(shape)
        last, timed = functional.pad(first[:, :-1], (1, 0)), seen and len(positions) < 4
        jumps = first < last if timed else first != last + 1
        starts = starts | (real & torch.where(before, jumps, first == 0))
    if mask.dtype != torch.bool:
        changes = functional.pad(mask[:, 1:] != mask[:, :-1], (1, 0))
        starts = starts | (real & before & changes)
    return real, starts


def packed_starts(given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return `sequences_of` a call in which a row has several, else None."""
    if tokens_of(given) is None or all(given.get(name) is None for name in PLACES):
        return None
    real, starts = sequences_of(given)
    return (real, starts) if bool((starts.sum(1) > 1).any()) else None


def kept_apart(stack: Any, given: dict[str, Any], run: Any = None) -> dict[str, Any]:
    """Return arguments with which transformers keeps packed rows apart; those of other rows stay.

    `run` is the stack's forward, if a call of it runs another. A `ConfigError` where the model
    mixes packed rows, or the call has a cache.
    """
    cached = any(given.get(name) is not None for name in CACHES)
    packed = None if cached else packed_starts(given)
    if packed is None:
        return given
    real, starts = packed
    told = tuple(name for name in OF_SEGMENTS if given.get(name) is not None)
    tried: dict[Any, bool] = vars(stack).setdefault(_MIXES, {})
    mask, positions = map(given.get, PLACES)
    state = None if "seq_idx" in told else state_of(stack)
    if told not in tried:
        tried[told] = state is not None or _mixes(stack, given, told, run or stack)
    # A dense mask (B, 1, T, T) may let the first token of a sequence see the one before.
    found = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    dense = [x[:, 0].diagonal(-1, 1, 2) for x in found if isinstance(x, Tensor) and x.dim() == 4]
    seen = [(x if x.dtype == torch.bool else x == 0) & starts[:, 1:] for x in dense]
    crosses = (isinstance(mask, Mapping) and None in found) or any(map(torch.any, seen))
    axes = len(positions) if positions is not None and positions.dim() > 2 else 0
    if given.get("use_cache"):
        reason = "transformers masks no packed row where there is a cache (use_cache=True)"
    elif 0 < axes < 4:
        reason = "its position_ids have several axes, and none of the text"
    elif tried[told] or ("flash" in str(stack.config._attn_implementation) and len(real) > 1):
        reason = state or "transformers masks this model without their positions"
    elif crosses:
        reason = "the attention_mask that was made for them does not keep them apart"
    elif mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return given | {"use_cache": False}
    else:
        columns = torch.arange(real.shape[1], device=real.device)
        within = columns - torch.where(starts, columns, 0).cummax(1).values
        # Padding is a sequence for each token. With a mask, positions would not be looked at.
        positions = positions if axes else torch.where(real, within, 0)
        return given | {"position_ids": positions, "attention_mask": None, "use_cache": False}
    raise ConfigError(
        f"{type(stack).__name__}: position_ids begin again within a row, as packed conversations "
        f"have them, and they would see each other: {reason}; prepare_training keeps some models' "
        "apart. Train one conversation a row (packing=False, padding_free=False)."
    )


def _look(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling() or vars(stack).get(SEPARATES):
        return None
    given = kwargs | dict(zip(parameters_of(stack), args, strict=False))
    return None if (found := kept_apart(stack, given)) is given else ((), found)


@torch.no_grad()
def _mixes(stack: Any, given: Mapping[str, Any], told: tuple[str, ...], run: Any) -> bool:
    """Whether a row's last token, at position 0, depends on those before."""
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    numbers = torch.arange(_TRIED, device=given[name].device)
    last = numbers == _TRIED - 1
    bounds = numbers.new_tensor([0, _TRIED - 1, _TRIED]).int()
    says = {"cu": bounds, "ma": _TRIED - 1, "se": last[None].int()}
    known: dict[str, Any] = {each: says[each[:2]] for each in told}
    known |= {"position_ids": torch.where(last, 0, numbers)[None], "use_cache": False}
    rows = [torch.where(last, 5, numbers + first)[None] for first in (6, 6 + _TRIED)]
    training = [module for module in stack.modules() if module.training]
    held, tried = vars(stack), vars(stack)[_MIXES]
    held[_MIXES] = {told: False}
    stack.eval()
    try:
        rows = rows if name == "input_ids" else list(map(stack.get_input_embeddings(), rows))
        outputs = [run(**{name: row}, **known).last_hidden_state for row in rows]
    finally:
        held[_MIXES] = tried
        for module in training:
            module.training = True
    first, second = (output[0, -1] for output in outputs)
    apart = (first - second).abs().max() / first.abs().max()
    return bool(apart > _NOISE * torch.finfo(first.dtype).eps)
