"""Attention of a model on meta: which is eager and need not be, and how other kinds are counted.

A class of transformers that supports no sdpa gets eager attention by default, which holds the
scores of every head; many of these support flex attention or name flash kernels, which hold none.
Neither runs on meta, where an attention that allocates as much takes their place.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .meta_ops import FusedAttentionCall

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"
_COUNTED = "moe_qlora_counted"

MEASURED = (
    "gpt-oss-20b trained 5.6 times as fast with it, at two thirds of the memory (one sequence of "
    "4,096 tokens, one H200: commit 5f0f82d in tools/bench/results/model.csv)."
)
"""The gain of flex attention, and its measurement."""


class EagerAttention(NamedTuple):
    """Eager attention that a class computes by default, and need not."""

    note: str  # The problem and its remedy
    flex: bool  # Whether the class supports flex attention


def eager_attention(model: nn.Module) -> EagerAttention | None:
    """Return whether a model's attention is eager and need not be, by attributes of its classes.

    These decide in transformers too: the model's own, and those of the language model inside it.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    if getattr(text, "_attn_implementation", None) != EAGER:
        return None
    models: list[Any] = [m for m in model.modules() if getattr(m, "config", None) is text]
    inner = next((each for each in models if hasattr(each, "_supports_sdpa")), None)
    if inner is None or inner._supports_sdpa:
        return None
    flex = all(getattr(each, "_supports_flex_attn", False) for each in (model, inner))
    kernels = ", ".join(getattr(inner, "_compatible_flash_implementations", None) or ())
    if not flex and not kernels:
        return None
    what = (
        f"{type(inner).__name__} supports no sdpa, so that attention is computed eagerly: for each "
        "head it holds scores of the sequence's length squared. Pass "
    )
    if flex:
        others = f" (or a flash kernel that the class names: {kernels})" if kernels else ""
        return EagerAttention(
            f'{what}attn_implementation="{FLEX}" to from_pretrained{others}; {MEASURED}', True
        )
    return EagerAttention(
        f"{what}a flash kernel that the class names as attn_implementation to from_pretrained "
        f"({kernels}); what that gives was not measured.",
        False,
    )


def attended(config: Any, seq_len: int) -> float:
    """Return how many tokens one attends to, on average of all places in a sequence.

    That is the mean of the layers with attention, some of which have a window, or attend within
    chunks; without `layer_types`, a configuration's window is that of all layers.
    """
    text = config.get_text_config()
    window = min(getattr(text, "sliding_window", None) or seq_len, seq_len)
    chunk = min(getattr(text, "attention_chunk_size", None) or seq_len, seq_len)
    spans = {
        "full_attention": seq_len / 2,
        "sliding_attention": window - window**2 / (2 * seq_len),
        "chunked_attention": chunk / 2,
    }
    types = [kind for kind in getattr(text, "layer_types", None) or () if kind in spans]
    return sum(spans[kind] for kind in types or ["sliding_attention"]) / max(len(types), 1)


def set_attention(model: nn.Module, name: str) -> None:
    """Let a model on meta compute attention as `from_pretrained(attn_implementation=name)` would.

    Raises:
        ConfigError: The model's class does not support it.
    """
    known = [EAGER]
    for kind, attribute in ((SDPA, "_supports_sdpa"), (FLEX, "_supports_flex_attn")):
        known += [kind] * bool(getattr(model, attribute, False))
    known += getattr(model, "_compatible_flash_implementations", None) or ()
    # transformers' own kernels, or a repository of the hub
    flash = re.fullmatch(r"flash_attention_\d+|.*/.*", name)
    if name not in known and not (flash and getattr(model, "_supports_flash_attn", False)):
        known += ["a flash kernel, as flash_attention_2"] * getattr(
            model, "_supports_flash_attn", False
        )
        raise ConfigError(
            f"attention is {name!r}, which {type(model).__name__} does not support; give one of "
            f"{', '.join(known)}."
        )
    for config in _configs(model):
        config._attn_implementation_internal = name


def make_countable(model: nn.Module) -> str | None:
    """Let a model on meta compute attention so that it runs there.

    Returns:
        A sentence where that is not by the model's own attention, else None.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # It has no function for masks, for which transformers makes none: these kernels need none.
    ALL_ATTENTION_FUNCTIONS.register(_COUNTED, _counted)
    asked = None
    for config in _configs(model):
        if (name := config._attn_implementation_internal) not in (None, EAGER, SDPA, _COUNTED):
            asked, config._attn_implementation_internal = name, _COUNTED
    return asked and (
        f"Attention by {asked} does not run on the meta device: it is counted as a fused kernel, "
        "which holds no scores."
    )


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and of its parts, each once."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if "_attn_implementation_internal" in vars(config)]


def _counted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Take `(batch, heads, tokens, size)`, as transformers' attention functions do."""
    out = FusedAttentionCall.apply(query, key, value, None)
    sinks = kwargs.get("s_aux")
    if sinks is not None:  # flex attention rescales its output by them
        out = out * torch.exp(out[..., :1] - sinks.view(1, -1, 1, 1)).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None
