"""Which forward a module runs where other code has bound one of its own to it.

- Liger's, known by its modules' name, computes the same from dequantized weights: it is disabled.
- Any other one runs. Whether it reads dequantized weights or calls the package's own forward, which
  adds LoRA itself, is not known beforehand: `lora/layer.py` prepares for both.

An attribute in an instance's `__dict__` overrides a method of its class, but not a property: so
`forward` is a property on the class of packed experts, and on PEFT's wrapper around them.
torch.compile looks into the `__dict__` first: eager calls, `train()` and `eval()` remove Liger's. A
forward assigned to the class has no effect on modules that are packed already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LIGER = "liger_kernel."
# Entries of a module's `__dict__`: Liger's functions that were removed from it, by name; and the
# last forward that was bound and is not Liger's.
_REMOVED = "_moe_qlora_removed_forward"
_ASSIGNED = "_moe_qlora_assigned_forward"
_RUN = "_moe_qlora_run"


def _silu_gate(pre: Tensor) -> Tensor:
    """Compute the gate of Liger's class: `(R, 2 I)`, the gate's half first, to `(R, I)`."""
    gate, up = pre.chunk(2, dim=-1)
    return F.silu(gate) * up


# The attributes that transformers' experts interface would set on a module of Liger's class.
LIGER_INTERFACE: Mapping[str, Any] = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "_apply_gate": _silu_gate,
}


def of_liger(module: nn.Module) -> bool:
    """Whether a module is of the class that Liger replaces a model's experts class by."""
    classes = (cls for cls in type(module).__mro__ if cls.__module__.startswith(_LIGER))
    return any(cls.__qualname__ == "LigerExperts" for cls in classes)


def is_ligers(method: Any) -> bool:
    """Whether a function, or one that is bound, is Liger's."""
    function = getattr(method, "__func__", method)
    return isinstance(function, FunctionType) and function.__module__.startswith(_LIGER)


def bound_forward(module: nn.Module) -> Any:
    """Return the forward bound to this instance that runs instead of its class's; None without."""
    state = module.__dict__
    bound = state.get("forward")
    if bound is None or not is_ligers(bound):
        return bound
    if not torch.compiler.is_compiling():
        remove_liger(module)
    return state.get(_ASSIGNED)


def remove_liger(module: nn.Module) -> None:
    """Take Liger's forward out of a module's `__dict__`, where torch.compile would find it."""
    state = module.__dict__
    if not is_ligers(state.get("forward")):
        return
    removed = state.setdefault(_REMOVED, {})
    for name in ("forward", "_get_name"):  # Liger binds both
        if is_ligers(state.get(name)):
            removed[name] = state.pop(name)
    if (assigned := state.get(_ASSIGNED)) is not None:
        state["forward"] = assigned


def forward_property(method: str) -> Any:
    """Return a property: the forward that is bound to an instance, else its method of this name."""

    def read(self: Any) -> Any:
        bound = bound_forward(self)
        return getattr(self, method) if bound is None else bound

    def assign(self: Any, forward: Any) -> None:
        # A hook that is removed assigns the forward that it found.
        if getattr(forward, "__func__", None) is getattr(type(self), method):
            unbind(self)
            return
        self.__dict__["forward"] = forward
        if not is_ligers(forward):
            self.__dict__[_ASSIGNED] = forward

    def unbind(self: Any) -> None:
        self.__dict__.pop("forward", None)
        self.__dict__.pop(_ASSIGNED, None)

    return property(read, assign, unbind)


def class_members(base: type[Any], run: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the members that the class of packed experts adds to `base`, `run` its forward."""

    def train(self: Any, mode: bool = True) -> Any:
        bound_forward(self)
        return base.train(self, mode)

    return {"forward": forward_property(_RUN), "train": train, _RUN: run}


def class_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, behind any property."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return next(each for each in forwards if each is not None and not isinstance(each, property))


def take_over(module: Any) -> None:
    """Manage the forward bound to a module with `class_members`.

    The module's own replaces Liger's, which hooks may have saved under another name; others stay.
    """
    state = module.__dict__
    bound = state.get("forward")
    if bound is not None and not is_ligers(bound):
        state[_ASSIGNED] = bound
    for name, value in list(state.items()):
        if name != "forward" and is_ligers(value) and value.__name__ == "forward":
            state.setdefault(_REMOVED, {})[name] = value
            state[name] = getattr(module, _RUN)


def give_back(module: nn.Module) -> None:
    """Undo `take_over`; a forward that was bound in between stays."""
    state = module.__dict__
    state.pop(_ASSIGNED, None)
    for name, value in state.pop(_REMOVED, {}).items():
        if name != "forward" or name not in state:
            state[name] = value
