"""The loss of Liger's forward of a model, computed without waiting for the device.

Liger's forward and its options stay: a copy of it finds `_Loss` where it looks up Liger's function,
in one model. In the plain case, a frozen head and no more than a loss asked for, the loss is that
of kernels/cross_entropy.py; else Liger's function computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from inspect import signature
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..experts.projection import first_order
from ..kernels import cross_entropy
from ..kernels.cross_entropy import IGNORED
from ..kernels.limits import cdiv

MISSING: Any = object()
"""The value before of an entry that was not there."""

_FORWARDS = "forward", "_old_forward"  # The second inside of accelerate's hook
_LOSS = "LigerForCausalLMLoss"
_CHUNKS = "chunk_mem_const"
_CHUNKS_LARGER = 8
"""How much larger than Liger's own the chunks of its loss are: about eight times the hidden states.

A step takes 309 ms with it, and 324 without (48 layers of Qwen3-30B-A3B, 4,096 tokens, one H200):
chunks of 64 tokens leave most of the GPU idle.
"""


def loss_obstacle(model: nn.Module) -> str | None:
    """Return why Liger's loss, which reads the head's weight alone, cannot be used; else None."""
    if _has_own_forward(model):
        return "other code, as TRL's, computes the loss by a forward of its own"
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, BaseTunerLayer):
        return "the head has LoRA, which Liger's loss would not compute"
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return "the head is quantized, and Liger's loss multiplies by its weight"
    if getattr(head, "bias", None) is not None:
        return "the head has a bias, which Liger's loss would not add"
    if "_loss_function" in vars(model):
        return "the model's loss_function was set, which Liger's forward would not call"
    return None


def _has_own_forward(model: nn.Module) -> bool:
    """Whether other code than Liger and accelerate's hooks has bound a forward to a model."""
    forward = vars(model).get("forward")
    if isinstance(forward, partial):  # of accelerate's hook
        forward = vars(model).get("_old_forward")
    if forward is None:
        return False
    # Wrappers copy the name and module of what they wrap, but not this.
    code: Any = getattr(getattr(forward, "__func__", forward), "__globals__", {})
    return not str(code.get("__name__")).startswith(("liger_kernel.", "transformers."))


def use_own_loss(model: nn.Module, undo: ExitStack) -> bool:
    """Let the forward that Liger has bound to a model call `_Loss`; False if it has bound none."""
    from liger_kernel.transformers import functional

    loss = _Loss(_defaults(functional.liger_fused_linear_cross_entropy))
    hook = model.register_forward_pre_hook(loss.before_forward, with_kwargs=True)
    undo.callback(hook.remove)
    state, found = vars(model), False
    for name in _FORWARDS:
        bound = state.get(name)
        function = getattr(bound, "__func__", None)
        if isinstance(function, FunctionType) and function.__module__.startswith("liger_kernel."):
            state[name] = mine = MethodType(_calling(loss, function), model)
            undo.callback(put_back, state, name, mine, bound)
            found = True
    return found


def put_back(now: dict[str, Any], name: str, value: Any, old: Any) -> None:
    """Restore an entry, unless other code has changed it meanwhile.

    A forward is restored where it is: accelerate's hook may have come or gone.
    """
    for place in _FORWARDS if name in _FORWARDS else (name,):
        held: Any = now.get(place)
        if held is not value:
            continue
        if old is not MISSING:
            now[place] = old
        elif place == name:
            del now[place]
        else:  # What a hook that came meanwhile would have found
            now[place] = MethodType(type(held.__self__).forward, held.__self__)


def _calling(loss: _Loss, function: FunctionType) -> FunctionType:
    """Return a copy of a function, and of what it wraps, that finds `loss` by Liger's name."""
    known = function.__globals__
    if _LOSS in function.__code__.co_names and _LOSS in known:
        loss.theirs = known[_LOSS]
        loss.options |= _defaults(loss.theirs)
        known = {**known, _LOSS: loss}
    cells = tuple(
        CellType(_calling(loss, inner)) if isinstance(inner, FunctionType) else cell
        for cell in function.__closure__ or ()
        for inner in (cell.cell_contents,)
    )
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, *, chunk: int,
    labelled: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the rows' cross entropy times `scale`, `()` float32 both, differentiable by `hidden`.

    The other arguments are those of `kernels.cross_entropy.loss_and_gradient`.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, scale, chunk, labelled)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int,
        labelled: int | None,
    ) -> Tensor:  # fmt: skip
        trains = ctx.needs_input_grad[0]
        loss, gradient = cross_entropy.loss_and_gradient(
            hidden, weight, labels, chunk=chunk, labelled=labelled, gradients=trains
        )
        if gradient is not None:
            ctx.save_for_backward(gradient, scale)
        return loss * scale

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, scale = ctx.saved_tensors
        # Scaled last, since gradients of single logits by thousands of labels are below float16;
        # in fp32, to which CUDA does not raise a factor without dimensions. Not in place: a second
        # backward of the same forward needs them again.
        factor = (upstream[0] * scale).view(1)
        scaled = torch.mul(gradient, factor, out=torch.empty_like(gradient))
        return scaled, None, None, None, None, None


class _LabelCount:
    """How many tokens of a batch have a label, without waiting for the layers' kernels.

    Labels are there when the GPU has come to the forward. To count them at once would take the
    host some 0.5 ms, with a profiler, in which the GPU waits (H100); later, it has layers to
    compute.
    """

    def __init__(self, given: Tensor, *, shifted: bool) -> None:
        self._given, self._shifted = ref(given), shifted
        self._there = (
            torch.cuda.current_stream(given.device).record_event() if given.is_cuda else None
        )

    def of(self, labels: Tensor | None) -> int | None:
        """Return the number if it is of these labels."""
        if labels is None or self._given() is not labels:
            return None
        # Each token is to predict the next one.
        predicted = labels if self._shifted else labels[..., 1:]
        if self._there is None:
            return int((predicted != IGNORED).sum())
        stream = _stream(labels.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._there)
            return int((predicted != IGNORED).sum())


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Loss:
    """`LigerForCausalLMLoss` of one model."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Begin without Liger's function, `theirs`; `options` are defaults by name."""
        self.theirs: Any = None
        self.options = options
        self._count: _LabelCount | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loss:
        """Return the same one: the forward of a copied model calls it too."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def before_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note a batch's labels, and ask for larger chunks where the call does not say."""
        shifted, labels = kwargs.get("shift_labels"), kwargs.get("labels")
        given = labels if shifted is None else shifted
        self._count = None
        if isinstance(given, Tensor) and model.training and not _is_capturing(given):
            self._count = _LabelCount(given, shifted=shifted is not None)
        if given is None or _CHUNKS not in self.options:
            return args, kwargs
        return args, {_CHUNKS: _CHUNKS_LARGER} | kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def __call__(
        self,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        labels: Tensor | None,
        hidden_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Any:
        """Return the loss of a batch, `()` float32, or what Liger's function does."""
        weight, count, hidden = lm_head_weight, self._count, None
        self._count = None
        larger = more.get(_CHUNKS, 1)
        if ignore_index == IGNORED and larger >= 1 and not self._asks_for_more(more):
            hidden = _as_multiplied(hidden_states, weight)
        if hidden is None:
            given = num_items_in_batch, ignore_index, shift_labels
            return self.theirs(hidden_states, weight, labels, hidden_size, *given, **more)
        given_labels = labels if shift_labels is None else shift_labels
        known = None if count is None else count.of(given_labels)
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        target = shift_labels.reshape(-1).to(hidden.device)
        hidden = hidden.reshape(-1, hidden_size)
        items = num_items_in_batch
        if items is None:
            items = (target != IGNORED).sum().clamp(min=1)  # Of no labels the mean is 0, as Liger's
        elif not isinstance(items, Tensor) or items.device != hidden.device:
            items = torch.full((), float(items), dtype=torch.float32, device=hidden.device)
        scale = items.float().reciprocal()
        # As Liger has it: logits of some `larger` times the hidden states' elements.
        pieces = cdiv(len(weight), larger * hidden_size)
        chunk = 1 << max(4, (cdiv(len(target), pieces) - 1).bit_length())
        return linear_cross_entropy(hidden, weight, target, scale, chunk=chunk, labelled=known)

    def _asks_for_more(self, given: Mapping[str, Any]) -> bool:
        """Whether something else is asked for than a loss: a soft cap, smoothing, accuracy."""
        known = {**self.options, _CHUNKS: given.get(_CHUNKS)}
        return any(name in known and value != known[name] for name, value in given.items())


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: each.default for name, each in signature(function).parameters.items()}


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _as_multiplied(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """Return hidden states in the weight's dtype; None where the product is not a plain one."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.requires_grad or weight.ndim != 2:
        return None
    if hidden.device != weight.device or weight.shape[1] != hidden.shape[-1]:
        return None
    kind = weight.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    return hidden.to(dtype) if dtype == weight.dtype and weight.is_contiguous() else None
