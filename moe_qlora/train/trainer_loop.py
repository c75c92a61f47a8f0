"""What Trainer repeats each step while the GPU waits: walks of the module tree, a look for NaN.

Each step it counts parameters for its FLOPs, calls `train()` and takes `parameters()` twice:
0.1 s over the 3,801 modules of Qwen3-30B-A3B with LoRA, where a step takes 0.2 s (H200). Modules
are listed once here, and again after torch registered one, or adapters came or went. One that is
only deleted stays in the list until then. Parameters are read from the modules each time: FSDP2
puts its shards in their place without registering them.

After each backward it looks for NaN in the loss (`logging_nan_inf_filter`), which waits for the
GPU, and the next batch then for the host. `torch.isnan` and `isinf` of an `EarlyLoss` look at a
copy made before the backward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registers
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ..layout import base_model

_LOOKS = (torch.isnan, torch.isinf)
_BACKWARD = (Tensor.backward, torch.autograd.grad)  # They compute layers again, as in forward
# What leaves a finite loss finite: with numbers, such as those of steps and of processes
_KEEPS = (Tensor.detach, Tensor.div, Tensor.mul, Tensor.mul_)
_OF_LOSS = ("loss", "log_probs")  # TRL computes its loss of the latter


def quicken_walks(model: nn.Module) -> Callable[[], None]:
    """Answer `named_parameters`, `train` and `num_parameters` by a list; return how to undo it."""
    # Results are those of the methods of its class. Other arguments than the defaults go to these.
    base: Any = base_model(model)
    tree, undo = _Tree(model, base), ExitStack()
    tree.is_told = True
    owners = {"named_parameters": model, "train": model, "num_parameters": base}
    for name, module in owners.items():
        # A method that other code has put on the instance stays
        if name not in vars(module) and hasattr(module, name):
            vars(module)[name] = getattr(tree, name)
            undo.callback(vars(module).pop, name, None)
    undo.callback(registers.register_module_module_registration_hook(tree.registered).remove)
    undo.callback(registers.register_module_parameter_registration_hook(tree.registered).remove)
    return undo.close


class _Tree:
    """The modules below a root. A bound method of it is copied with the model by `deepcopy`."""

    def __init__(self, root: nn.Module, base: Any) -> None:
        self.root, self.base = root, base
        self._adapters = -1  # Number of adapters when all was listed; -1: list again
        self._modules: dict[str, nn.Module] = {}
        self._known: set[int] = set()  # Their ids
        self.is_told = False  # Of changes, by hooks: a copy is not, and lists each time
        self._counts: dict[bool, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tree":
        return _Tree(deepcopy(self.root, memo), deepcopy(self.base, memo))

    def registered(self, module: nn.Module, *_: Any) -> None:
        # Of all modules in the process: a slice of layers is a new ModuleList in each forward
        if id(module) in self._known:
            self._adapters = -1

    def look(self) -> "_Tree":
        adapters = len(getattr(self.root, "peft_config", ()))
        if self._adapters != adapters or not self.is_told:
            self._adapters, self._counts = adapters, {}
            self._modules = dict(self.root.named_modules())
            self._known = {*map(id, self._modules.values())}
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if args or (kwargs and kwargs != {"recurse": True}):  # As `parameters()` calls it
            return type(self.root).named_parameters(self.root, *args, **kwargs)
        found: dict[nn.Parameter, str] = {}  # A tied one has its first name
        for prefix, module in self.look()._modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
        return iter([(name, parameter) for parameter, name in found.items()])

    def train(self, mode: bool = True) -> nn.Module:
        if set(map(attrgetter("training"), self.look()._modules.values())) != {mode}:
            type(self.root).train(self.root, mode)
        return self.root

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count = partial(type(self.base).num_parameters, self.base)
        if only_trainable:  # requires_grad may change from one call to the next
            return count(only_trainable, exclude_embeddings)
        counts = self.look()._counts
        if exclude_embeddings not in counts:
            counts[exclude_embeddings] = count(only_trainable, exclude_embeddings)
        return counts[exclude_embeddings]


def copy_losses_early(model: nn.Module) -> RemovableHandle:
    """Let the loss that comes of a model's output be an `EarlyLoss`; return how to undo it."""

    def replace(_: nn.Module, __: Any, output: Any) -> None:
        plain = isinstance(output, dict) and not torch.compiler.is_compiling()
        for name in _OF_LOSS if plain else ():
            if type(tensor := output.get(name)) is Tensor and tensor.requires_grad:
                output[name] = EarlyLoss.of(tensor)

    return model.register_forward_hook(replace)


class EarlyLoss(Tensor):
    """A loss, or what one is computed from: `backward` first begins to copy it to the host."""

    _copies: list[tuple[Tensor, torch.cuda.Event | None]]  # One at most; of all that is as finite
    _made: int  # Its version

    @classmethod
    def of(cls, tensor: Tensor, copies: list[Any] | None = None) -> "EarlyLoss":
        """Return the same tensor as an `EarlyLoss`."""
        early = tensor.as_subclass(cls)
        early._copies, early._made = [] if copies is None else copies, tensor._version
        return early

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            plain, kwargs = tree_map_only(cls, _plain, (args, kwargs))
            if func is Tensor.backward and isinstance(args[0], cls):
                copy = plain[0].detach().to("cpu", non_blocking=True, copy=True)
                cuda = plain[0].is_cuda
                done = torch.cuda.current_stream(plain[0].device).record_event() if cuda else None
                args[0]._copies[:] = [(copy, done)]
            return func(*plain, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            first: Any = args[0] if args and isinstance(args[0], cls) else None
            known = first is not None and first._version == first._made
            if known and func in _LOOKS and first._copies:
                copy, done = first._copies[0]
                if done is not None:
                    done.synchronize()
                return func(copy)
            found = func(*args, **kwargs)
            if known and func in _KEEPS and not any(isinstance(x, Tensor) for x in args[1:]):
                return cls.of(found, first._copies)
            return cls.of(found) if isinstance(found, Tensor) and found.requires_grad else found

    def __format__(self, spec: str) -> str:
        return format(_plain(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(loss: EarlyLoss) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)
