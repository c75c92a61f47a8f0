"""A loss whose NaN is known while the GPU still computes the backward.

After each backward, Trainer looks for NaN in the loss (`logging_nan_inf_filter`), which waits for
the GPU. `torch.isnan` and `isinf` of this loss look at a copy made before the backward.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

_LOOKS = (torch.isnan, torch.isinf)
_BACKWARD = (Tensor.backward, torch.autograd.grad)  # They compute layers again, as in forward
# What leaves a finite loss finite: with numbers, such as those of steps and of processes
_KEEPS = (Tensor.detach, Tensor.div, Tensor.mul, Tensor.mul_)


def copy_losses_early(model: nn.Module) -> RemovableHandle:
    """Let the loss in a model's output be an `EarlyLoss`; return how to undo it."""

    def replace(_: nn.Module, __: Any, output: Any) -> None:
        loss: Any = output.get("loss") if isinstance(output, dict) else None
        plain = type(loss) is Tensor and loss.dim() == 0 and loss.requires_grad
        if plain and not torch.compiler.is_compiling():
            output["loss"] = EarlyLoss.of(loss)

    return model.register_forward_hook(replace)


class EarlyLoss(Tensor):
    """A loss `()` with a copy on the host. Results of operations on it are plain tensors."""

    _copy: tuple[Tensor, torch.cuda.Event | None, int] | None = None  # Of this version

    @classmethod
    def of(cls, loss: Tensor) -> EarlyLoss:
        """Return the same loss, whose copying has begun."""
        copy = loss.detach().to("cpu", non_blocking=True, copy=True)
        done = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None
        early = loss.as_subclass(cls)
        early._copy = copy, done, loss._version
        return early

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            args, kwargs = tree_map_only(cls, _plain, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            copy: Any = args[0]._copy if args and isinstance(args[0], cls) else None
            known = copy is not None and args[0]._version == copy[2]
            if known and func in _LOOKS:
                if copy[1] is not None:
                    copy[1].synchronize()
                return func(copy[0])
            found = func(*args, **kwargs)
            if known and func in _KEEPS and not any(isinstance(x, Tensor) for x in args[1:]):
                found = found.as_subclass(cls)
                found._copy = *copy[:2], found._version
            return found

    def __format__(self, spec: str) -> str:
        return format(_plain(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(loss: EarlyLoss) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)
