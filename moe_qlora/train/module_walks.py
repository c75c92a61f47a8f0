"""Walks of the module tree that a training loop repeats each step, without walking it.

Each step Trainer counts parameters for its FLOPs, calls `train()` and takes `parameters()` twice:
0.1 s over the 3,801 modules of Qwen3-30B-A3B with LoRA, where a step takes 0.2 s (H200). Modules
and parameters are listed once here, and again after one was added, replaced or removed. To look for
that takes 2.5 ms, six times a step while the GPU waits. So it is done in forward, while the GPU
computes, and holds until the next one: for what torch registers, adapters, and moves of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registers

from ..lora.packed_rows import decoder_stacks
from ..lora.targets import base_model


def quicken_walks(model: nn.Module) -> Callable[[], None]:
    """Answer `named_parameters`, `train` and `num_parameters` from lists; return how to undo it.

    Results are those of the methods of its class. Other arguments than the defaults go to these.

    Args:
        model: The model that the loop calls: a transformers model, or a PEFT model around one.
    """
    base: Any = base_model(model)
    tree, undo = _Tree(model, getattr(base, "num_parameters", None)), ExitStack()
    # A method that other code has put on the instance stays. Packing puts a count: wrap it.
    names = [(model, n) for n in ("named_parameters", "train", "_apply") if n not in vars(model)]
    for module, name in [*names, *([(base, "num_parameters")] if tree.count else [])]:
        before = vars(module).get(name)
        vars(module)[name] = getattr(tree, name)
        undo.callback(
            vars(module).pop if before is None else vars(module).__setitem__, name, before
        )
    for stack in decoder_stacks(model):
        undo.callback(stack.register_forward_hook(tree.look_in_training).remove)
    undo.callback(registers.register_module_module_registration_hook(tree.forget).remove)
    undo.callback(registers.register_module_parameter_registration_hook(tree.forget).remove)
    return undo.close


class _Tree:
    """The modules below a root. A bound method of it is copied with the model by `deepcopy`."""

    def __init__(self, root: nn.Module, count: Callable[..., int] | None) -> None:
        self.root, self.count = root, count
        self._looked = -1  # Number of adapters when nothing had changed; -1: look again
        self._dicts: list[dict[str, Any]] = []  # Of modules: their children and parameters
        self._held: Any = None  # What these held: sizes, and identities
        self._modules: list[nn.Module] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._counts: dict[bool, int] = {}

    def look_in_training(self, stack: nn.Module, *_: Any) -> None:
        if stack.training and torch.is_grad_enabled():  # Generation has a forward for each token
            self.forget()
            self.look()

    def forget(self, *_: Any) -> None:
        self._looked = -1

    def look(self) -> _Tree:
        """List modules and parameters, unless they are known."""
        adapters = len(getattr(self.root, "peft_config", ()))
        if self._looked != adapters:
            self._looked = adapters
            if self._held is None or self._now() != self._held:
                self._modules = list(self.root.modules())
                self._parameters = list(type(self.root).named_parameters(self.root))
                own = map(vars, self._modules)
                self._dicts = [each[name] for each in own for name in ("_modules", "_parameters")]
                self._held, self._counts = self._now(), {}
        return self

    def _now(self) -> tuple[list[int], list[int]]:
        held = chain.from_iterable(map(dict.values, self._dicts))
        return list(map(len, self._dicts)), list(map(id, held))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if args or (kwargs and kwargs != {"recurse": True}):  # As `parameters()` calls it
            return type(self.root).named_parameters(self.root, *args, **kwargs)
        return iter(list(self.look()._parameters))

    def train(self, mode: bool = True) -> nn.Module:
        if set(map(attrgetter("training"), self.look()._modules)) != {mode}:
            type(self.root).train(self.root, mode)
        return self.root

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        self.forget()  # It may put others in the place of parameters
        return type(self.root)._apply(self.root, *args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        assert self.count is not None
        if only_trainable:  # requires_grad may change from one call to the next
            return self.count(only_trainable, exclude_embeddings)
        self.look()
        if exclude_embeddings not in self._counts:
            self._counts[exclude_embeddings] = self.count(only_trainable, exclude_embeddings)
        return self._counts[exclude_embeddings]
