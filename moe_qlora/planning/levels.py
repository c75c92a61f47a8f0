"""How to run a decoder layer so that it keeps what its level says between forward and backward.

    recompute   its input; backward computes the layer again
    part        also what the experts save for backward, attention's output and its log-sum-exp:
                half of the bytes of all, for three quarters of the recomputation
    attention   the same without the experts: "part" of long sequences (choice.py)
    keep        all that backward needs; nothing is computed again

The two in the middle are torch's selective checkpointing: a set of operators whose outputs are
kept, and an error where one was changed in place. In code of torch.compile these are all
operators. An eager layer has it around each attention alone: torch refuses a recomputation that
calls any operator more often than the forward did, as experts do whose workspace has grown
meanwhile. Experts there hand their tensors over themselves (experts/kept.py), since they come from
an `autograd.Function`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..experts.kept import kept_tensors
from . import choice

RECOMPUTE, PART, ATTENTION, KEEP = LEVELS = choice.LEVELS

_ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "moe_qlora::planned_attention",
    "moe_qlora::segment_attention",
    "flex_attention",  # a higher-order operator, without a namespace in its name
)
_ATTENTIONS = ("scaled_dot_product_attention", "planned_attention", "segment_attention")
"""Functions of eager layers that call these operators. Flex attention there is compiled alone."""

_OF_TOKENS = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}
"""Dimensions of lengths, in arguments of so many dimensions: offsets, positions, hidden, masks."""

# Of torch.compile
_OPTIONS = {
    # Before torch 2.13 Dynamo does not look at parameters of a dictionary that it saw in the
    # call before: code for fp32 adapters ran on bf16 ones (TRL casts their `.data`), past
    # their end. https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/config.py
    "skip_tensor_guards_with_matching_dict_tags": False,
    # Code around a layer may set attributes, which Dynamo refuses within a checkpoint: it would
    # then run all of it eagerly.
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    # DDP's buckets cut what one graph of a whole model would be; a layer is compiled by itself.
    "optimize_ddp": False,
    # Versions of one function: `compute` has some for each class of layers. Then it runs
    # eagerly, without an error.
    "recompile_limit": 64,
}


def compute(
    level: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """Compute `function(*args, **kwargs)`, a layer, so that it keeps what a level says.

    Tensors that the layer's gradients flow to are among `args`. `preserve_rng_state`: whether a
    recomputation draws the random numbers of the forward; not where a CUDA graph sees to it.
    """
    if level == KEEP:
        return function(*args, **kwargs)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if level != RECOMPUTE and torch.compiler.is_compiling():
        how["context_fn"] = _part if level == PART else _attention
    elif level != RECOMPUTE:
        how["context_fn"] = partial(_eager_contexts, level)

    def call(*args: Any) -> Any:
        return function(*args, **kwargs)

    return checkpoint(call, *args, **how)


def runner(own: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    """Return a function of (level, args, kwargs) that computes `own`, compiled if asked for.

    Under "recompute" the compiled function runs again, and not another: fused in another way, a
    router may choose other experts. One compilation serves rows of all lengths.
    """
    whole = _compile(own) if compiles else own
    saved = {"joint_custom_post_pass": _lengths_are_saved()} if compiles else {}
    part = _compile(compute, **saved) if compiles else compute

    def run(level: str, args: Any, kwargs: Any, *, preserve_rng_state: bool = True) -> Any:
        if compiles and torch.is_grad_enabled():
            args = _alike(args, kwargs)
        does, function = (part, own) if level in (PART, ATTENTION) else (compute, whole)
        return does(level, function, args, kwargs, preserve_rng_state=preserve_rng_state)

    return run


def _lengths_are_saved() -> Any:
    """Return a pass over a graph that lets backward have lengths, which nothing can recompute."""
    # Inductor of torch 2.11 marks a length as recomputed where it replaces a size by it: routers in
    # groups (GLM-4.5, DeepSeek-V3) did not compile, "Node add was invalid, but is output".
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class LengthsAreSaved(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                if node.op == "placeholder":
                    node.meta.pop("recompute", None)

        def uuid(self) -> bytes:
            return b"moe_qlora, lengths are saved"

    return LengthsAreSaved()


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled = torch.compile(function, options=options or None)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_OPTIONS):
            return compiled(*args, **kwargs)

    return run


def _alike(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a layer and its arguments in the form that one compilation serves.

    Lengths are marked as dynamic, before the first one is compiled for itself: those of tokens,
    tables of segments and masks. Hidden states have a gradient in the first layer too: else it is
    compiled apart, and its backward runs down to its input's norm anyway.
    """
    layer, x, *others = args if len(args) > 1 else (args[0], None)
    trains = isinstance(x, Tensor) and not x.requires_grad and isinstance(layer, nn.Module)
    if trains and x.is_floating_point() and any(p.requires_grad for p in layer.parameters()):
        x = x.detach().requires_grad_()
        args = (layer, x, *others)
    for leaf in tree_leaves((args[1:], kwargs)):
        if isinstance(leaf, Tensor):
            dims = _OF_TOKENS.get(leaf.dim(), ())
            torch._dynamo.maybe_mark_dynamic(leaf, [dim for dim in dims if leaf.shape[dim] > 1])
    return args


class _AroundAttention(TorchFunctionMode):
    """Runs each attention in a context of its own, and all in another.

    It may be entered again: torch recomputes once for each backward.
    """

    def __init__(
        self,
        context: Callable[[], Any],
        whole: AbstractContextManager[Any],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.context, self.whole, self.end = context, whole, end

    def __enter__(self) -> Self:
        self.whole.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.end()
        self.whole.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attends = getattr(func, "__name__", "") in _ATTENTIONS
        with self.context() if attends else nullcontext():
            return func(*args, **(kwargs or {}))


def _eager_contexts(level: str) -> tuple[_AroundAttention, _AroundAttention]:
    """Return contexts for the forward of an eager layer's checkpoint and its recomputations."""
    saves, takes = kept_tensors() if level == PART else (nullcontext(), nullcontext())
    again: deque[Any] = deque()  # Contexts of the recomputation of each attention

    def keep() -> Any:
        forward, recomputation = _attention()
        again.append(recomputation)
        return forward

    def take() -> Any:
        # A second backward of the same forward computes it again.
        return again.popleft() if again else nullcontext()

    # A recomputation may end early; the next one starts at the first attention.
    return _AroundAttention(keep, saves), _AroundAttention(take, takes, again.clear)


def _of_part(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition(".")[0]
    # A projection's last argument says whether it is kept.
    projection = name == "moe_qlora::experts_projection" and args[-1]
    if projection or name == "moe_qlora::experts_layer":
        return CheckpointPolicy.MUST_SAVE
    return _of_attention(ctx, operator)


def _of_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Top-k in compiled code: computed again by other fused kernels, it may choose other experts.
    kept = operator.name().partition(".")[0] in (*_ATTENTION_OPERATORS, "aten::topk")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_part = partial(create_selective_checkpoint_contexts, _of_part)
_attention = partial(create_selective_checkpoint_contexts, _of_attention)
