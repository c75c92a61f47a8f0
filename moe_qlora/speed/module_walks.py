"""Walks of the module tree that a training loop repeats each step, without walking it.

Each step Trainer counts parameters for its FLOPs, calls `train()` and takes `parameters()` twice:
0.1 s over the 3,801 modules of Qwen3-30B-A3B with LoRA, where a step takes 0.2 s (H200). Modules
and parameters are listed once here, and again after one was added, replaced or removed. To look for
that takes 2.5 ms, six times a step while the GPU waits. So it is done in forward, while the GPU
computes, and holds until the next one: for what torch registers, adapters, and moves of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registers

from ..lora.packed_rows import decoder_stacks
from ..lora.targets import base_model


def quicken_walks(model: nn.Module) -> Callable[[], None]:
    """Answer `named_modules`, `named_parameters`, `train` and `num_parameters` from lists.

    Results are those of the methods of its class. Other arguments than the defaults go to these.

    Args:
        model: The model that the loop calls: a transformers model, or a PEFT model around one.

    Returns:
        A function that undoes it.
    """
    tree = _Tree(model)
    before: list[tuple[nn.Module, str, Any]] = []

    def place(module: nn.Module, name: str, call: Any) -> None:
        before.append((module, name, vars(module).get(name)))
        vars(module)[name] = call

    # A method that other code has put on the instance stays. Packing puts a count: wrap it.
    for name in ("named_modules", "named_parameters", "train"):
        if name not in vars(model):
            place(model, name, getattr(tree, name))
    base: Any = base_model(model)
    if hasattr(base, "num_parameters"):
        place(base, "num_parameters", _Count(tree, base.num_parameters).num_parameters)
    if "_apply" not in vars(model):
        place(model, "_apply", tree.apply)
    hooks = [stack.register_forward_hook(tree.look) for stack in decoder_stacks(model)]
    hooks.append(registers.register_module_module_registration_hook(tree.forget))
    hooks.append(registers.register_module_parameter_registration_hook(tree.forget))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, name, call in before:
            vars(module).pop(name, None)
            if call is not None:
                vars(module)[name] = call

    return undo


class _Tree:
    """The modules below a root. A bound method of it is copied with the model by `deepcopy`."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self._first = root, id(root)
        self.version = 0
        self._looked = -1  # Number of adapters when nothing had changed; -1: look again
        self._modules: list[tuple[str, nn.Module]] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._children = self._weights = _Dicts([])

    def look(self, stack: nn.Module, *_: Any) -> None:
        """Look for changes in a training forward; generation has one for each token.

        A copy of the model, whose registrations are not noted, looks at each call instead.
        """
        if not (stack.training and torch.is_grad_enabled()):
            return
        self.forget()
        self.parameters()
        self._looked = self._adapters() if id(self.root) == self._first else -1

    def forget(self, *_: Any) -> None:
        """Look for changes at the next call."""
        self._looked = -1

    def apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Move or cast the modules, which may put others in the place of parameters."""
        self.forget()
        return type(self.root)._apply(self.root, *args, **kwargs)

    def _adapters(self) -> int:
        return len(getattr(self.root, "peft_config", ()))

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return `(name, module)` as the class's `named_modules()` yields them."""
        if self._looked == self._adapters():
            return self._modules
        if not self._modules or self._children.have_changed():
            self._modules = list(type(self.root).named_modules(self.root))
            held = [vars(module) for _, module in self._modules]
            self._children = _Dicts([each["_modules"] for each in held])
            self._weights, self._parameters = _Dicts([each["_parameters"] for each in held]), []
            self.version += 1
        return self._modules

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return `(name, parameter)` as the class's `named_parameters()` yields them."""
        self.modules()
        if self._looked != self._adapters() and (
            not self._parameters or self._weights.have_changed()
        ):
            self._parameters = list(type(self.root).named_parameters(self.root))
            self._weights = _Dicts(self._weights.dicts)
        return self._parameters

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if memo is not None or prefix or not remove_duplicate:
            return type(self.root).named_modules(self.root, memo, prefix, remove_duplicate)
        return iter(list(self.modules()))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if prefix or not recurse or not remove_duplicate:
            return type(self.root).named_parameters(self.root, prefix, recurse, remove_duplicate)
        return iter(list(self.parameters()))

    def train(self, mode: bool = True) -> nn.Module:
        modules = [module for _, module in self.modules()]
        if set(map(attrgetter("training"), modules)) != {mode}:
            type(self.root).train(self.root, mode)
        return self.root


class _Dicts:
    """Dicts of modules, and what they held."""

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self.dicts = dicts
        self._some = [each for each in dicts if each]
        self._sizes, self._ids = self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        held = chain.from_iterable(map(dict.values, self._some))
        return list(map(len, self.dicts)), list(map(id, held))

    def have_changed(self) -> bool:
        return self._now() != (self._sizes, self._ids)


class _Count:
    """The number of a model's parameters, counted again for each version of a tree."""

    def __init__(self, tree: _Tree, count: Callable[..., int]) -> None:
        self._tree, self._count = tree, count
        self._counts: dict[tuple[int, bool], int] = {}

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        if only_trainable:  # requires_grad may change from one call to the next
            return self._count(only_trainable, exclude_embeddings)
        self._tree.modules()
        key = (self._tree.version, exclude_embeddings)
        if key not in self._counts:
            self._counts = {key: self._count(only_trainable, exclude_embeddings)}
        return self._counts[key]
