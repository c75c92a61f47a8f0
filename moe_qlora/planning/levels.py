"""How much a decoder layer keeps between forward and backward: levels, and how to run each.

    recompute     its input; backward computes the layer again
    experts       also what the experts save for backward: of all in a layer, what saves most time a
                  byte (8 us of recomputation a MB; Qwen3-30B-A3B, 4,096 tokens, one H200)
    attention     also attention's output and its log-sum-exp (7 us a MB)
    narrow projections
                  also the outputs of Linear layers that give out fewer features than they take:
                  most sum over many, as attention's output does (6 us)
    projections   also the outputs of the other Linear layers (3 us)
    keep          all that backward needs; nothing is computed again (norms, rotary embedding,
                  casts: 1 us a MB)

In long sequences "attention alone", without what the experts save, is in the place of "experts".
A layer on one of those in between is a non-reentrant checkpoint that keeps tensors: as outputs
of operators, but those of the experts by `experts/kept.py`, since they come from an
`autograd.Function`. In code of torch.compile all are operators, and the compiler decides what else
is cheaper kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from types import CodeType, FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..experts.kept import is_in_experts, kept_tensors
from . import choice

RECOMPUTE, EXPERTS, ATTENTION, NARROW, PROJECTIONS, KEEP = LEVELS = choice.LEVELS
ATTENTION_ALONE = choice.ATTENTION_ALONE
EVERY = (RECOMPUTE, EXPERTS, ATTENTION_ALONE, ATTENTION, NARROW, PROJECTIONS, KEEP)
"""All levels; those between the first and the last keep a part."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "moe_qlora::planned_attention",
    "moe_qlora::segment_attention",
)
_EXPERTS_LAYER = "moe_qlora::experts_layer"
_EXPERTS_PROJECTION = "moe_qlora::experts_projection"  # its last argument: whether it is kept
_TOP_K = "aten::topk"
"""Kept in compiled code: computed again by other fused kernels, it may choose other experts."""
_FLEX = "flex_attention"  # a higher-order operator, without a namespace in its name

_OF_TOKENS = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}
"""Dimensions of lengths, in arguments of so many dimensions: offsets, positions, hidden, masks."""

_PRODUCTS: dict[str, Callable[[Sequence[Any]], tuple[int, int]]] = {
    "aten::mm": lambda args: (args[0].shape[-1], args[1].shape[-1]),
    "aten::addmm": lambda args: (args[1].shape[-1], args[2].shape[-1]),
    "bitsandbytes::gemm_4bit": lambda args: (args[0].shape[-1], args[2][0]),
}
"""Operators of Linear layers: arguments -> features that they sum over, and that they give out."""
_LEAST_INNER = 256
"""Least inner dimension of a product that is kept: an element takes two operations for each, so
those of LoRA's second factor are quicker computed than read."""


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
        level: One of `EVERY`.
        function: Called as `function(*args, **kwargs)`.
        args: Tensors that the layer's gradients flow to are among these.
        kwargs: Other arguments.
        preserve_rng_state: Whether a recomputation draws the random numbers of the forward; not
            where a CUDA graph sees to it.
        recomputing: Makes a context to recompute in.
    """
    if level == KEEP:
        return function(*args, **kwargs)

    def call(*args: Any) -> Any:
        return function(*args, **kwargs)

    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if torch.compiler.is_compiling():
        if level != RECOMPUTE:
            how["context_fn"] = _COMPILED[level]
        return checkpoint(call, *args, **how)
    try:
        return checkpoint(call, *args, context_fn=lambda: _contexts(level, recomputing), **how)
    except BaseException as error:
        _end_checkpoint(error.__traceback__, call.__code__)
        raise


def _end_checkpoint(trace: TracebackType | None, call: CodeType) -> None:
    """Take a failed checkpoint's hooks off the tensors that others save.

    Before torch 2.13 a frame of `checkpoint` holds the generator that does, as long as the error is
    handled: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/utils/checkpoint.py#L508
    """
    frames = trace.tb_next if trace else None
    while frames and frames.tb_frame.f_code is not call:
        frames.tb_frame.clear()
        frames = frames.tb_next


def runner(own: Callable[..., Any], *, compiles: bool) -> Callable[..., Any]:
    """Return a function of (level, args, kwargs) that computes `own`, compiled if asked for.

    Under "recompute" the compiled function runs again, and not another: fused in another way, a
    router may choose other experts. One compilation serves rows of all lengths.
    """
    whole = _compile(own) if compiles else own
    parts: dict[str, Callable[..., Any]] = {}

    def run(level: str, args: Any, kwargs: Any, *, preserve_rng_state: bool = True) -> Any:
        if compiles and torch.is_grad_enabled():
            args = _alike(args, kwargs)
        if not compiles or level in (RECOMPUTE, KEEP):
            return compute(level, whole, args, kwargs, preserve_rng_state=preserve_rng_state)
        if level not in parts:
            parts[level] = _compile(_compute_of(level))
        # Joined LoRA (train/joined_lora.py) holds a product on an object for the next layers, which
        # Dynamo refuses within a checkpoint, and would then run all of it eagerly.
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            return parts[level](level, own, args, kwargs, preserve_rng_state=preserve_rng_state)

    return run


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with guards that see that a parameter's `.data` changed, as by TRL's cast.

    Before torch 2.13 Dynamo does not look at parameters of a dictionary that it saw in the call
    before: code for fp32 adapters was run on bf16 ones, and read past their end.
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/config.py
    """
    compiled = torch.compile(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
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


@cache
def _compute_of(level: str) -> Callable[..., Any]:
    """Return `compute` with code of its own for each level.

    torch.compile counts its versions of a function by its code, and takes no more than eight.
    """
    code = compute.__code__.replace(co_name=f"compute_{level.replace(' ', '_')}")
    copied = FunctionType(code, globals())
    copied.__kwdefaults__ = compute.__kwdefaults__
    return copied


def _contexts(level: str, recomputing: Callable[[], AbstractContextManager[Any]]) -> _Contexts:
    pairs: list[_Contexts] = [(nullcontext(), recomputing())]
    if level not in (RECOMPUTE, ATTENTION_ALONE):
        pairs.append(kept_tensors())
    if level not in (RECOMPUTE, EXPERTS):
        held: deque[Any] = deque()
        pairs.append((_Keeps(level, held), _Returns(level, held)))
    forward, again = zip(*pairs, strict=True)
    return _All(forward), _All(again)


class _All:
    """Several contexts, which may be entered again: torch recomputes once for each backward."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


def _keeps(level: str, operator: Any, args: Sequence[Any]) -> bool:
    """Whether a level keeps an operator's output, that of the experts apart."""
    name = _name(operator)
    if name in _ATTENTION_OPERATORS or name == _FLEX:
        return level != EXPERTS
    if level not in (NARROW, PROJECTIONS) or name not in _PRODUCTS:
        return False
    inner, outer = _PRODUCTS[name](args)
    return bool(inner >= _LEAST_INNER and (level == PROJECTIONS or outer < inner))


@cache
def _name(operator: Any) -> str:
    name: str = operator.name()
    return name.partition(".")[0]


_AUTOCAST = [
    ("cpu", torch._C.DispatchKey.AutocastCPU),
    ("cuda", torch._C.DispatchKey.AutocastCUDA),
]
"""Devices that experts compute on, and the keys of their autocast in torch's dispatcher."""


class _LayerMode(TorchDispatchMode):
    """Sees the operators of a layer that is not compiled, apart from those of its experts.

    torch's own selective checkpointing refuses a recomputation that calls any operator more often
    than the forward did, as experts do whose workspace has grown meanwhile.
    """

    supports_higher_order_operators = True

    def __init__(self, level: str, held: deque[Any]) -> None:
        super().__init__()
        self.level, self.held = level, held
        self.autocast: list[Any] = []

    def __enter__(self) -> Any:
        self.autocast = [key for device, key in _AUTOCAST if torch.is_autocast_enabled(device)]
        return super().__enter__()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator under autocast, as it runs without a mode.

        Under one, torch leaves autocast out of operators whose kernels are written in Python, such
        as bitsandbytes' on a CPU: they would compute in float32, and results depend on the level.
        """
        if not self.autocast or func.namespace == "aten":
            return func(*args, **(kwargs or {}))
        for key in self.autocast:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for key in self.autocast:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the layer run compiled."""
        return True

    def is_kept(self, func: Any, args: Any) -> bool:
        """Whether this operator's output is kept."""
        return not is_in_experts() and _keeps(self.level, func, args)


class _Keeps(_LayerMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.run(func, args, kwargs)
        if self.is_kept(func, args):
            # A copy: the model, a hook or a kernel may change the output in place, and an alias has
            # no version that tells (`aten::_unsafe_view` of a Linear layer's output has its own).
            self.held.append(tree_map_only(Tensor, Tensor.clone, out))
        return out


class _Returns(_LayerMode):
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.held.clear()  # of a recomputation that ended early; the next one starts at the first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.held and self.is_kept(func, args):
            return self.held.popleft()
        return self.run(func, args, kwargs)


def _compiled(level: str) -> Callable[[], Any]:
    """Return what makes a checkpoint's contexts for a level in compiled code."""

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _name(operator)
        experts = name == _EXPERTS_LAYER or (name == _EXPERTS_PROJECTION and args[-1])
        keeps = (
            (experts and level != ATTENTION_ALONE)
            or name == _TOP_K
            or _keeps(level, operator, args)
        )
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


_COMPILED = {level: _compiled(level) for level in EVERY[1:-1]}
