"""Forwards that other code has bound to packed experts, or to PEFT's wrapper around them.

Liger's, known by its modules' name, computes the same from dequantized weights: it is left out.
Any other one runs, and may call the package's own forward, which adds LoRA itself (lora/layer.py).
An attribute in an instance's `__dict__` overrides a method of its class, but not a property: so
`forward` is a property on both classes.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LIGER = "liger_kernel."


def _silu_gate(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, dim=-1)  # The gate's half first
    return F.silu(gate) * up


# The attributes that transformers' experts interface would set on Liger's class.
LIGER_INTERFACE: Mapping[str, Any] = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "_apply_gate": staticmethod(_silu_gate),
}


def of_liger(kind: type) -> bool:
    """Whether a module's class is that by which Liger replaces a model's experts class."""
    classes = (cls for cls in kind.__mro__ if cls.__module__.startswith(_LIGER))
    return any(cls.__qualname__ == "LigerExperts" for cls in classes)


def is_ligers(method: Any) -> bool:
    """Whether a function, or one that is bound, is Liger's."""
    function = getattr(method, "__func__", method)
    return isinstance(function, FunctionType) and function.__module__.startswith(_LIGER)


def bound_forward(module: nn.Module) -> Any:
    """Return the forward bound to this instance that runs instead of its class's, or None."""
    bound = module.__dict__.get("forward")
    # Compiled code looks into the `__dict__` first, and would run Liger's
    ignored = bound is not None and is_ligers(bound) and not torch.compiler.is_compiling()
    return None if ignored else bound


def remove_liger(module: nn.Module) -> None:
    """Take Liger's functions out of a module's `__dict__`, where torch.compile would find them."""
    for name in ("forward", "_get_name"):  # Liger binds both
        if is_ligers(module.__dict__.get(name)):
            del module.__dict__[name]


def forward_property(method: str) -> Any:
    """Return a property: the forward that is bound to an instance, else its method of this name."""

    def read(self: Any) -> Any:
        bound = bound_forward(self)
        return getattr(self, method) if bound is None else bound

    def assign(self: Any, forward: Any) -> None:
        # A hook that is removed assigns the forward that it found.
        if getattr(forward, "__func__", None) is getattr(type(self), method):
            unbind(self)
        else:
            self.__dict__["forward"] = forward

    def unbind(self: Any) -> None:
        self.__dict__.pop("forward", None)

    return property(read, assign, unbind)


def class_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, behind any property."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return next(each for each in forwards if each is not None and not isinstance(each, property))
