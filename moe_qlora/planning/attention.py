"""Attention of a model on meta: which is eager and need not be, and how other kinds are counted.

A class of transformers that supports no sdpa gets eager attention by default, which holds the
scores of every head; many of these support flex attention or name flash kernels, which hold none.
Neither runs on meta, where an attention takes their place that allocates, and saves for backward,
as CUDA's fused kernels do; it stands for sdpa too, whose rule on meta would count all scores.
"""

import re
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"
_COUNTED = "moe_qlora_counted"


def eager_attention(model: Any) -> str | None:
    """Return a sentence if a model's attention is eager and may be flex."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    eager = getattr(text, "_attn_implementation", None) == EAGER
    # Attributes of its class decide, in transformers too.
    if not eager or model._supports_sdpa or not model._supports_flex_attn:
        return None
    return (
        f"{type(model).__name__} supports no sdpa, so that attention is computed eagerly: for each "
        "head it holds scores of the sequence's length squared. Pass "
        f'attn_implementation="{FLEX}" to from_pretrained; gpt-oss-20b trained 5.6 times as fast '
        "with it, at two thirds of the memory (one sequence of 4,096 tokens, one H200: commit "
        "5f0f82d in tools/bench/results/model.csv)."
    )


def set_attention(model: nn.Module, name: str) -> None:
    """Let a model on meta compute attention as `from_pretrained(attn_implementation=name)` would.

    Raises:
        ConfigError: The model's class does not support it.
    """
    flash = bool(getattr(model, "_supports_flash_attn", False))
    known = [EAGER]
    for kind, attribute in ((SDPA, "_supports_sdpa"), (FLEX, "_supports_flex_attn")):
        known += [kind] * bool(getattr(model, attribute, False))
    known += getattr(model, "_compatible_flash_implementations", None) or ()
    # transformers' own kernels, or a repository of the hub
    if name not in known and not (flash and re.fullmatch(r"flash_attention_\d+|.*/.*", name)):
        known += ["a flash kernel, as flash_attention_2"] * flash
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


def _fused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # The kernels lay their output out as (batch, length, heads, size), so that no copy follows.
    batch, heads, length, _ = query.shape
    size = value.shape[-1]
    strides = (length * heads * size, size, heads * size, 1)
    out = query.new_empty_strided((batch, heads, length, size), strides)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@cache
def _planned_attention() -> Any:
    """Return the attention of plans: an operator, so that checkpoints can keep its output."""
    define: Any = torch.library.custom_op
    operator = define("moe_qlora::planned_attention", _fused, mutates_args=())
    operator.register_fake(_fused)
    return torch.ops.moe_qlora.planned_attention


class FusedAttentionCall(torch.autograd.Function):
    """Allocates what CUDA's fused attention allocates; saves no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        out, sums = _planned_attention()(query, key, value)
        ctx.save_for_backward(query, key, value, mask, sums, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, _, sums, _ = ctx.saved_tensors
        heads = query.shape[1]
        delta = torch.empty_like(sums)
        wide = query.new_empty(query.shape, dtype=torch.float32)  # sums of the query's gradient
        grads = [torch.empty_like(query)]
        for tensor in (key, value):
            # With fewer key heads than query heads, gradients are made for each of the latter.
            full = tensor.new_empty((tensor.shape[0], heads, *tensor.shape[2:]))
            grads.append(full if tensor.shape[1] == heads else torch.empty_like(tensor))
        del wide, delta
        return (*grads, None)


def fused_attention() -> AbstractContextManager[Any]:
    """In this block, `scaled_dot_product_attention` on meta is `FusedAttentionCall`."""
    stock = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if query.dim() != 4 or not query.is_meta:
            return stock(query, key, value, attn_mask, *args, **kwargs)
        return FusedAttentionCall.apply(query, key, value, attn_mask)

    return patch.object(F, "scaled_dot_product_attention", attention)
