"""Attention over the segments of a flat row, as an attention implementation of transformers.

A flat row `(1, L)` holds sequences one after the other; `offsets` `(S + 1,)` int32 say where each
begins, padded by repeating the end, so that its shape is fixed. Where flash kernels serve, a
`SegmentMask` takes the place of the attention mask, which every family hands on, and

    out = softmax(q k^T * scale, sinks) v      of queries and keys of the same segment, causal

is one operator over them: torch's flash attention for sequences of different lengths, with grouped
heads, sliding windows, values narrower than keys (MLA) and sinks; where the segments are rows of
one length, cuDNN's on Hopper. It reads on the host which of these, so that one compilation of a
layer serves all. Sinks are a part of the softmax's sum. With `lse' = log(exp(lse) + exp(sink))` and
`out' = out * exp(lse - lse')`, the same backward kernel, given `out'` and `lse'`, returns the right
gradients, and `-exp(sink - lse') * <grad, out'>` is the sink's.

Elsewhere (a CPU, 32 bit, wide heads, dropout, caps) a dense mask of segments goes to the model's
own implementation. In other calls `segmented(name)` delegates to the implementation of that name.
"""

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..kernels import cards

PREFIX = "moe_qlora_segments_"
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)  # of flash attention
_WIDEST_HEAD = 256  # likewise
_DENSE = ("sdpa", "eager")
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor offsets, "
    "Tensor sizes, int window, float scale) -> (Tensor, Tensor, Tensor)"
)
_CAPS = ("softcap", "logit_cap", "position_bias", "attention_bias")


class SegmentMask(NamedTuple):
    """Keys that a query attends to: those of its segment up to itself, within the window."""

    offsets: Tensor  # (S + 1,) int32
    # (2,) int64 on the host. No segment has more tokens than the first; segments are as many rows
    # of one length as the second, which is 0 where they have any.
    sizes: Tensor
    window: int  # 0: all


@dataclass
class Segments:
    """The segments of the flat row that runs now."""

    length: int  # L
    offsets: Tensor  # (S + 1,) int32
    longest: int  # No segment has more tokens
    recorded: bool  # Whether rows of this length are recorded as CUDA graphs
    dense: bool  # Whether the model's attention cannot take offsets
    rows: int = 0  # Segments are so many rows of one length; 0: of any
    alone: bool = False  # Whether memory does not hold graphs of other rows beside it


running: ContextVar[Segments | None] = ContextVar("moe_qlora_segments", default=None)
"""The flat row that runs now."""


def segment_ids(offsets: Tensor, length: int) -> Tensor:
    """Return the segment of each token `(L,)` int64."""
    numbers = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:], numbers, right=True)


def segmented(name: str) -> str:
    """Return the attention implementation that adds segments to the one of this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if name.startswith(PREFIX):
        return name
    _register()
    AttentionInterface.register(PREFIX + name, partial(_attention, name))
    AttentionMaskInterface.register(PREFIX + name, partial(_mask, name))
    return PREFIX + name


def _mask(original: str, **kwargs: Any) -> Any:
    """Return the mask of one kind of attention: offsets, or a dense mask, in a flat row."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    now = running.get()
    if now is None:
        return MASKS[original](**kwargs)
    config, device = kwargs["config"], kwargs["device"]
    dtype = kwargs["dtype"]
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    # Other masks than causal and sliding ones are functions that the model has given.
    plain = kwargs.get("allow_is_causal_skip", True) and "allow_is_bidirectional_skip" not in kwargs
    plain = plain and not kwargs.get("use_vmap") and not chunked
    if plain and not now.dense and has_kernels(device, dtype):
        sizes = torch.tensor([now.longest, now.rows])
        return SegmentMask(now.offsets, sizes, kwargs.get("local_size") or 0)
    function, ids = kwargs["mask_function"], segment_ids(now.offsets, now.length)
    places = torch.arange(now.length, device=device) - now.offsets.long()[ids]

    def within(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        # Chunks begin with each segment; a window is a difference.
        seen = function(batch, head, *((places[q], places[kv]) if chunked else (q, kv)))
        return seen & (ids[q] == ids[kv])

    kwargs |= {"mask_function": within, "attention_mask": None, "allow_is_causal_skip": False}
    return MASKS[original if original in _DENSE else "sdpa"](**kwargs)


def _attention(
    original: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any = None, *args: Any, scaling: float | None = None, dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention `(B, T, heads, D)` of queries `(B, heads, T, D)`."""
    if isinstance(attention_mask, SegmentMask):
        if torch.is_autocast_enabled(query.device.type):
            to = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(to), key.to(to), value.to(to)
        capped = any(kwargs.get(name) is not None for name in _CAPS)
        fits = query.dtype in DTYPES and max(query.shape[-1], value.shape[-1]) <= _WIDEST_HEAD
        if fits and not args and not dropout and not capped:
            return attend(query, key, value, attention_mask, kwargs.get("s_aux"), scaling), None
        attention_mask = _dense(attention_mask, query.shape[2])
        if original == "eager":
            least = torch.finfo(query.dtype).min
            attention_mask = torch.where(attention_mask, 0.0, least).to(query.dtype)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and original not in _DENSE:
        original = "sdpa"
    if original == "eager":  # The model's own file has it
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS[original]
    out: tuple[Tensor, Tensor | None] = function(
        module, query, key, value, attention_mask, *args, scaling=scaling, dropout=dropout, **kwargs
    )
    return out


def _dense(mask: SegmentMask, length: int) -> Tensor:
    """Return the mask `(1, 1, L, L)`, True where a query sees a key."""
    ids = segment_ids(mask.offsets, length)
    numbers = torch.arange(length, device=ids.device)
    q, kv = numbers[:, None], numbers[None]
    seen = (kv <= q) & (ids[:, None] == ids[None])
    return (seen & (kv > q - mask.window) if mask.window else seen)[None, None]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: SegmentMask, sinks: Tensor | None,
    scaling: float | None,
) -> Tensor:  # fmt: skip
    """Return attention over segments `(1, L, heads, D of values)`, by flash kernels.

    Queries are `(1, heads, L, D)`, keys and values `(1, key heads, L, D)` in 16 bit; the D of
    values may be less. `sinks` `(heads,)`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    wide, narrow = query.shape[-1], value.shape[-1]
    if narrow < wide:
        value = functional.pad(value, (0, wide - narrow))
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    # Windows of flash attention are counted without the query's own key.
    window = mask.window - 1 if mask.window else -1
    out, _ = torch.ops.moe_qlora.segment_attention(
        q, k, v, mask.offsets, mask.sizes, sinks, window, scale
    )
    return (out[..., :narrow].contiguous() if narrow < wide else out)[None]


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention is there for tensors of this dtype."""
    if dtype not in DTYPES or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _register() -> None:
    """Define the operators, once; nothing is registered on import."""
    if hasattr(torch.ops.moe_qlora, "segment_attention"):
        return
    define: Any = partial(torch.library.custom_op, mutates_args=())
    forward = define("moe_qlora::segment_attention", _forward)
    forward.register_fake(
        lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32))
    )
    backward = define("moe_qlora::segment_attention_backward", _backward, schema=_BACKWARD)
    backward.register_fake(lambda grad, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, offsets, sizes, sinks, *ctx.numbers = inputs
        rest = [] if sinks is None else [sinks]
        ctx.save_for_backward(q, k, v, *output, offsets, sizes, *rest)
        ctx.set_materialize_grads(False)

    def back(ctx: Any, grad: Tensor, _: Any) -> Any:
        q, k, v, out, lse, offsets, sizes, *sinks = ctx.saved_tensors
        grad, of_sinks = grad.contiguous(), None
        grads = backward(grad, q, k, v, out, lse, offsets, sizes, *ctx.numbers)
        if sinks and ctx.needs_input_grad[5]:
            inner = (grad.float() * out.float()).sum(-1)  # (L, heads)
            taken = torch.exp(sinks[0].float()[:, None] - lse).t()
            of_sinks = -(taken * inner).sum(0).to(sinks[0].dtype)
        return *grads, None, None, of_sinks, None, None

    forward.register_autograd(back, setup_context=setup)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sizes: Tensor, sinks: Tensor | None,
    window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = kernel_forward(q, k, v, offsets, sizes, window, scale)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
        out = (out * torch.exp(lse - with_sinks).t()[..., None]).to(out.dtype)
        lse = with_sinks
    return out, lse


def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *saved, offsets, sizes, window, scale = args
    return kernel_backward(grad, saved, offsets, sizes, window, scale)


def suits_cudnn(q: Tensor, rows: int, window: int) -> bool:
    """Whether cuDNN computes segments that are rows of one length, which is quicker on Hopper."""
    # 4,096 tokens in one row, 32 heads, forward and backward on an H200: 1.1 ms, by offsets 2.5.
    if rows == 0 or 0 <= window < len(q) // rows - 1 or q.shape[-1] > 128 or not q.is_cuda:
        return False
    hopper = cards.card(q.device).capability == cards.HOPPER
    return hopper and torch.backends.cuda.cudnn_sdp_enabled()


def _as_rows(x: Tensor, rows: int) -> Tensor:
    """Return `(rows, heads, T, D)` of `(L, heads, D)`, in the same memory."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _windowed(window: int) -> dict[str, int]:
    return {"window_size_left": window, "window_size_right": 0 if window >= 0 else -1}


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention `(L, heads, D)` and its log-sum-exp `(heads, L)`."""
    longest, rows = sizes.tolist()
    if not suits_cudnn(q, rows, window):
        longest = min(longest, len(q))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, window < 0, False, scale=scale,
            **_windowed(window),
        )  # fmt: skip
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_as_rows(x, rows) for x in (q, k, v)), None, True, 0.0, True, False, scale=scale
    )
    lse = lse.view(rows, q.shape[1], -1).transpose(0, 1)
    return out.transpose(1, 2).reshape(q.shape), lse.reshape(q.shape[1], -1)


def kernel_backward(
    grad: Tensor, saved: Sequence[Tensor], offsets: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; saved are q, k, v, out, lse."""
    q, k, v, out, lse = saved
    longest, rows = sizes.tolist()
    if not suits_cudnn(q, rows, window):
        longest = min(longest, len(q))
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # Of no dropout
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *saved, offsets, offsets, longest, longest, 0.0, window < 0, state,
            torch.empty(0, device=q.device), scale=scale, **_windowed(window),
        )  # fmt: skip
        return found
    of_rows = lse.unflatten(1, (rows, -1)).transpose(0, 1).contiguous()[..., None]
    state, length = torch.zeros((), dtype=torch.int64, device=q.device), len(q) // rows
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_as_rows(x, rows) for x in (grad, q, k, v, out)), of_rows, state, state, None, None, None,
        length, length, 0.0, True, scale=scale,
    )  # fmt: skip
    of_q, of_k, of_v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in grads)
    return of_q, of_k, of_v
