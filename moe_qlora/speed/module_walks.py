"""Walks of the module tree that a training loop repeats each step, without walking it.

Trainer counts parameters for its FLOPs, calls `train()` and takes `parameters()` twice each step. Over
the 3,801 modules of Qwen3-30B-A3B with LoRA that is 0.1 s a step (tools/bench/results/journey.csv).
The tree is listed once here, and again after a module was added, replaced or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..lora.names import base_model


def quicken_walks(model: nn.Module) -> Callable[[], None]:
    """Answer `named_modules`, `train` and `num_parameters` of a model from a list of its modules.

    Results are those of the methods of its class. Other arguments than the defaults go to these.

    Args:
        model: The model that the loop calls: a transformers model, or a PEFT model around one.

    Returns:
        A function that undoes it.
    """
    tree = _Tree(model)
    base = base_model(model)
    placed: list[tuple[nn.Module, str]] = []

    def place(module: nn.Module, name: str, call: Any) -> None:
        # A method that other code has put on the instance (PEFT's support, a user's) stays.
        if name not in vars(module) and hasattr(module, name):
            vars(module)[name] = call
            placed.append((module, name))

    place(model, "named_modules", tree.named_modules)
    place(model, "train", tree.train)
    place(base, "num_parameters", _Count(tree, base).num_parameters)

    def undo() -> None:
        for module, name in placed:
            vars(module).pop(name, None)

    return undo


class _Tree:
    """The modules below a root. A bound method of it is copied with the model by `deepcopy`."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.version = 0
        self._entries: list[tuple[str, nn.Module]] = []
        self._children: list[list[nn.Module | None]] = []

    def entries(self) -> list[tuple[str, nn.Module]]:
        """Return `(name, module)` as the class's `named_modules()` yields them."""
        if not self._entries or self._children != _children(self._entries):
            self._entries = list(type(self.root).named_modules(self.root))
            self._children = _children(self._entries)
            self.version += 1
        return self._entries

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if memo is not None or prefix or not remove_duplicate:
            return type(self.root).named_modules(self.root, memo, prefix, remove_duplicate)
        return iter(list(self.entries()))

    def train(self, mode: bool = True) -> nn.Module:
        if any(module.training is not mode for _, module in self.entries()):
            type(self.root).train(self.root, mode)
        return self.root


def _children(entries: list[tuple[str, nn.Module]]) -> list[list[nn.Module | None]]:
    return [list(module._modules.values()) for _, module in entries]


class _Count:
    """The number of parameters of a transformers model, counted again for each version of a tree."""

    def __init__(self, tree: _Tree, base: nn.Module) -> None:
        self._tree = tree
        self._base: Any = base
        self._counts: dict[tuple[int, bool], int] = {}

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        self._tree.entries()
        key = (self._tree.version, exclude_embeddings)
        if only_trainable or key not in self._counts:
            count: int = type(self._base).num_parameters(
                self._base, only_trainable, exclude_embeddings
            )
            if only_trainable:  # requires_grad may change from one call to the next
                return count
            self._counts = {key: count}
        return self._counts[key]
