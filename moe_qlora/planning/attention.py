"""How a model computes attention: what is to be said of it, and how a plan counts it.

transformers chooses an implementation by attributes of a model's class. A class that supports no
sdpa gets eager attention by default, which holds the scores of every head; many of these support
flex attention or name flash kernels, which hold none. Neither runs on the meta device, so a plan
replaces them by an attention that allocates and saves tensors of the same sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .meta_ops import FusedAttentionCall

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"

MEASURED = (
    "gpt-oss-20b trained 5.6 times as fast with flex_attention as with eager attention (14,100 "
    "beside 2,532 tokens/s), at a peak of 17.1 GB beside 25.2 (one sequence of 4,096 tokens, one "
    "H200: commit 5f0f82d in tools/bench/results/model.csv)."
)
"""The gain of flex attention, and its measurement."""

_COUNTED = "moe_qlora_counted"


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """Eager attention of a class that supports no sdpa, and what the class has in its place."""

    class_name: str
    flex: bool  # Whether the class supports flex attention
    kernels: tuple[str, ...]  # Flash kernels that the class names

    @property
    def what(self) -> str:
        """The problem in one sentence."""
        return (
            f"{self.class_name} supports no sdpa, so that attention is computed eagerly: for each "
            "head it holds scores of the sequence's length squared."
        )

    @property
    def cure(self) -> str:
        """The remedy, and its gain where it was measured."""
        named = ", ".join(self.kernels)
        if not self.flex:
            return (
                "Pass a flash kernel that the class names as attn_implementation to "
                f"from_pretrained ({named}); what that gives was not measured."
            )
        kernels = f" (or a flash kernel that the class names: {named})" if named else ""
        return f'Pass attn_implementation="{FLEX}" to from_pretrained{kernels}; {MEASURED}'


def eager_attention(model: nn.Module) -> EagerAttention | None:
    """Return what is seen where a model's attention is eager and need not be, else None.

    Attributes of the class decide, as they do in transformers: the model's own, and those of the
    language model inside it, if any.
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
    kernels = tuple(getattr(inner, "_compatible_flash_implementations", None) or ())
    return EagerAttention(type(inner).__name__, flex, kernels) if flex or kernels else None


def attended(config: Any, seq_len: int) -> float:
    """Return how many tokens one attends to, on average of all places in a sequence.

    That is the mean of the layers with attention, some of which have a window, or attend within
    chunks; without `layer_types`, a configuration's window is that of all layers.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or seq_len
    chunk = getattr(text, "attention_chunk_size", None) or seq_len
    window, chunk = min(window, seq_len), min(chunk, seq_len)
    spans = {
        "full_attention": seq_len / 2,
        "sliding_attention": window - window**2 / (2 * seq_len),
        "chunked_attention": chunk / 2,
    }
    types = [kind for kind in getattr(text, "layer_types", None) or () if kind in spans]
    return sum(spans[kind] for kind in types or ["sliding_attention"]) / max(len(types), 1)


def hold_back(config: Any) -> str | None:
    """Take flash kernels' names off a configuration and its parts in place.

    A model would load the kernel while it is built, and nothing here computes.

    Returns:
        The kernel of the language model, None without one.
    """
    asked = config.get_text_config()._attn_implementation
    for each in _with_parts(config):
        if _is_kernel(each._attn_implementation):
            each._attn_implementation_internal = None
    return asked if _is_kernel(asked) else None


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            yield from _with_parts(getattr(config, key))


def _is_kernel(name: str | None) -> bool:
    """True for a flash kernel: one of transformers' own, or a repository of the hub."""
    return name is not None and ("/" in name or bool(re.fullmatch(r"flash_attention_\d+", name)))


def set_attention(model: nn.Module, name: str) -> None:
    """Let a model on meta compute attention as `from_pretrained(attn_implementation=name)` would.

    Raises:
        ConfigError: The model's class does not support it.
    """
    supports = {
        EAGER: True,
        SDPA: getattr(model, "_supports_sdpa", False),
        FLEX: getattr(model, "_supports_flex_attn", False),
    }
    kernels = getattr(model, "_compatible_flash_implementations", None) or ()
    flash = getattr(model, "_supports_flash_attn", False)
    if not supports.get(name, (flash and _is_kernel(name)) or name in kernels):
        kernels = kernels or (["a flash kernel, as flash_attention_2"] if flash else ())
        known = ", ".join([*(key for key, held in supports.items() if held), *kernels])
        raise ConfigError(
            f"attention is {name!r}, which {type(model).__name__} does not support; give one of "
            f"{known}."
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
        name = config._attn_implementation_internal
        if name not in (None, EAGER, SDPA, _COUNTED):
            asked = name
            config._attn_implementation_internal = _COUNTED
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
