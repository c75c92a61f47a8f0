"""How much a decoder layer keeps between forward and backward: four levels, and how to run each.

    recompute   its input; backward computes the layer again
    experts     also what the experts save for backward: of all in a layer, what saves most time a
                byte (8 us of recomputation a MB; Qwen3-30B-A3B, 4,096 tokens, one H200)
    attention   also attention's output and its log-sum-exp (7 us a MB)
    keep        all that backward needs; nothing is computed again (the rest: 1 to 3 us a MB)

A layer under "experts" or "attention" is a non-reentrant checkpoint that keeps tensors: attention's
as outputs of operators, those of the experts by `experts/kept.py`, since they come from an
`autograd.Function`. In code of torch.compile both are operators, and the compiler decides what else
is cheaper kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..experts.kept import kept_tensors
from . import choice

RECOMPUTE, EXPERTS, ATTENTION, KEEP = LEVELS = choice.LEVELS

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "moe_qlora::planned_attention",
)
_EXPERTS_OPERATORS = ("moe_qlora::experts_layer", "moe_qlora::experts_projection", "aten::topk")
"""With the top-k: computed again by other fused kernels, it may choose other experts."""
_FLEX = "flex_attention"  # a higher-order operator, without a namespace in its name


def compute(
    level: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    preserve_rng_state: bool = True,
    recomputing: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Compute a layer's function so that it keeps what its level keeps.

    Args:
        level: One of `LEVELS`.
        function: Called as `function(*args, **kwargs)`.
        args: Tensors that the layer's gradients flow to are among these.
        kwargs: Other arguments.
        preserve_rng_state: Whether a recomputation draws the random numbers of the forward; not
            where a CUDA graph sees to it.
        recomputing: Makes a context to recompute in.
    """
    if level == KEEP:
        return function(*args, **kwargs)
    how: dict[str, Any] = {}
    if torch.compiler.is_compiling():
        if level != RECOMPUTE:
            how["context_fn"] = _compiled_experts if level == EXPERTS else _compiled_attention
    else:
        how["context_fn"] = lambda: _contexts(level, recomputing)

    def call(*args: Any) -> Any:
        return function(*args, **kwargs)

    how |= {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if torch.compiler.is_compiling():
        return checkpoint(call, *args, **how)
    try:
        return checkpoint(call, *args, **how)
    except BaseException as error:
        _end_checkpoint(error.__traceback__, call)
        raise


def _end_checkpoint(trace: TracebackType | None, call: FunctionType) -> None:
    """Take a failed checkpoint's hooks off the tensors that others save.

    Before torch 2.13 a frame of `checkpoint` holds the generator that does, as long as the error is
    handled: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/utils/checkpoint.py#L508
    """
    frames = trace.tb_next if trace else None
    while frames and frames.tb_frame.f_code is not call.__code__:
        frames.tb_frame.clear()
        frames = frames.tb_next


def runner(own: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    """Return a function of (level, args, kwargs) that computes `own`, compiled if asked for.

    Under "recompute" the compiled function runs again, and not another: fused in another way, a
    router may choose other experts.
    """
    whole = torch.compile(own) if compiles else own

    def run(level: str, args: Any, kwargs: Any, *, preserve_rng_state: bool = True) -> Any:
        if not compiles or level in (RECOMPUTE, KEEP):
            return compute(level, whole, args, kwargs, preserve_rng_state=preserve_rng_state)
        part = _compiled_part(level)
        return part(level, own, args, kwargs, preserve_rng_state=preserve_rng_state)

    return run


@cache
def _compiled_part(level: str) -> Callable[..., Any]:
    """Return `compute` compiled, with code of its own for each level.

    torch.compile counts its versions of a function by its code, and takes no more than eight.
    """
    code = compute.__code__.replace(co_name=f"compute_{level}")
    copied = FunctionType(code, globals())
    copied.__kwdefaults__ = compute.__kwdefaults__
    return torch.compile(copied)


def _contexts(level: str, recomputing: Callable[[], AbstractContextManager[Any]]) -> _Contexts:
    pairs: list[_Contexts] = [(nullcontext(), recomputing())]
    if level in (EXPERTS, ATTENTION):
        pairs.append(kept_tensors())
    if level == ATTENTION:
        held: deque[Any] = deque()
        pairs.append((_Keeps(held), _Returns(held)))
    forward, again = zip(*pairs, strict=True)
    return _all_of(forward), _all_of(again)


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _compiled_experts() -> Any:
    return create_selective_checkpoint_contexts(_keeps_experts)


def _compiled_attention() -> Any:
    return create_selective_checkpoint_contexts(_keeps_both)


@cache
def _is_of(operator: Any, attention: bool, experts: bool) -> bool:
    name = operator.name()
    name = name.partition(".")[0]
    return (attention and (name in _ATTENTION_OPERATORS or name == _FLEX)) or (
        experts and name in _EXPERTS_OPERATORS
    )


class _AttentionMode(TorchDispatchMode):
    """Sees attention's operators in a layer that is not compiled.

    torch's own selective checkpointing refuses a recomputation that calls any operator more often
    than the forward did, as experts do whose workspace has grown meanwhile.
    """

    supports_higher_order_operators = True

    def __init__(self, held: deque[Any]) -> None:
        super().__init__()
        self.held = held

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the layer run compiled."""
        return True


class _Keeps(_AttentionMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_of(func, True, False):
            # Without autograd's node, which would hold the layer's tensors.
            self.held.append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class _Returns(_AttentionMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.held and _is_of(func, True, False):
            return self.held.popleft()
        return func(*args, **(kwargs or {}))


def _keeps_experts(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy(_is_of(operator, False, True))


def _keeps_both(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy(_is_of(operator, True, True))


def _policy(keeps: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
