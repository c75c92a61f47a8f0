"""What differs where several processes hold one model: the seam between one GPU and many.

    world()             what this process does: a `World`, which is a single process, or several
                        ranks' (distributed/ranks.py) where torch runs several
    world_of(model)     the same, and several ranks' for a model that is laid out for them
    share_of(module)    the experts that this rank holds of a layer; None where it holds all

No other room imports distributed/: the package's face provides it here. torch is imported only
when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_Result = TypeVar("_Result")

NOT_GIVEN: Final[Any] = object()
"""Stands for a `state_dict` that a caller left out, which is not the same as None."""

SHARE = "_moe_qlora_share"  # the attribute of an experts module that notes its share
CHECKED = "_moe_qlora_checked"  # that of a model which notes what `before_forward` has checked


class Share(Protocol):
    """The experts `[first, last)` that this rank holds of a layer's `experts`."""

    @property
    def experts(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def count(self) -> int: ...

    def mean(self, name: str, absmax: Tensor) -> Tensor:
        """Return the mean of a weight's absmax over all ranks."""

    def factors(self, a: nn.Parameter, b: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """Return this rank's part of the whole `lora_A` `(E r, in)` and `lora_B` `(out, r E)`."""

    def local(self, factor: Tensor) -> Tensor:
        """Return this rank's part of a factor, whose gradient is averaged over all batches."""


def share_of(module: nn.Module) -> Share | None:
    """Return which experts a module holds; None where it holds all of its layer's."""
    return cast("Share | None", module.__dict__.get(SHARE))


def first_share(model: nn.Module) -> Share | None:
    """Return the share of the model's first experts module that has one; None if none has."""
    shares = (share_of(module) for module in model.modules())
    return next((share for share in shares if share is not None), None)


def whole_shape(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a module's expert weight with the experts of all ranks."""
    share = share_of(module)
    return tuple(shape) if share is None else (share.experts, *shape[1:])


def absmax_mean(share: Share | None, name: str) -> Callable[[Tensor], Tensor]:
    """Return what gives the mean of a weight's absmax: this rank's, or of a share all ranks'."""
    import torch

    return torch.mean if share is None else partial(share.mean, name)


@dataclass(frozen=True)
class WholeTensor:
    """What a tensor of a state dict is when it is whole, and how it is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None  # None where gathering tells
    source: Any  # the state dict's value: the tensor itself, or this rank's share
    gather: Callable[[], Tensor]  # all ranks must call it, where it is `divided`
    divided: bool


class World:
    """A single process, which holds the whole model."""

    several = False

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return True

    def lay_out(self, model: nn.Module) -> None:
        """Give packed weights the layout that engines of many GPUs shard."""

    def device(self) -> int | None:
        """Return the index of this rank's CUDA device, None where the current one is right."""
        return None

    def prepare_adapters(self, model: nn.Module, config: Any) -> None:
        """Lay a model out before it gets adapters; raise where it cannot have them any more."""

    def check_adapters(self, model: nn.Module, configs: Mapping[str, Any]) -> None:
        """Raise where ranks give adapters of one model other settings."""

    def follow_adapters(self, model: nn.Module, peft_model: nn.Module | None = None) -> None:
        """Keep the factors of new adapters as engines and ranks need them."""

    def check_undivided(self, model: nn.Module, action: str) -> None:
        """Raise an `AdapterError` where experts are divided over ranks, and `action` needs all."""

    def check_unsharded(self, model: nn.Module, action: str, advice: str) -> None:
        """Raise an `AdapterError` where weights are sharded, and `action` needs them whole."""

    def before_forward(self, model: nn.Module) -> None:
        """Check what engines have made of a packed model, once, before its first forward."""

    def stock_class(self, module: nn.Module) -> type:
        """Return the class of a module before an engine made it another."""
        return type(module)

    def state_dict_to_save(self, model: nn.Module, given: Any) -> Mapping[str, Any] | None:
        """Return the state dict that a save was given, or the model's; None to take no part."""
        if given is None or given is NOT_GIVEN:
            return cast("Mapping[str, Any]", model.state_dict())
        return cast("Mapping[str, Any]", given)

    def is_divided(self, model: nn.Module, state_dict: Mapping[str, Any]) -> bool:
        """Whether ranks hold different parts of this state dict of the model."""
        return False

    def plain_tensor(self, value: Any) -> WholeTensor:
        """Return how a tensor that is no part of a packed weight is gathered."""
        shape = tuple(getattr(value, "shape", ()))
        dtype: Any = getattr(value, "dtype", None)
        return WholeTensor(dtype, shape, value, lambda: cast("Tensor", value), False)

    def whole_tensors(
        self, model: nn.Module, state_dict: Mapping[str, Any]
    ) -> dict[str, WholeTensor]:
        """Return the tensors of a state dict under bitsandbytes' keys, each as a whole one."""
        return {key: self.plain_tensor(value) for key, value in state_dict.items()}

    def gather_to_first(
        self,
        tensors: Mapping[str, WholeTensor],
        use: Callable[[Callable[[str], Tensor]], _Result],
        what: str,
    ) -> _Result | None:
        """Return `use(read)` on the first rank, where `read(key)` returns a whole tensor."""
        return use(lambda key: tensors[key].gather())


_SINGLE = World()
_make: Callable[[], World] | None = None
_several: World | None = None


def provide(make: Callable[[], World]) -> None:
    """Say what makes the `World` of several ranks, once it is needed."""
    global _make
    _make = make


def many_ranks() -> Any:
    """Return the `World` of several ranks, whether torch runs several or not."""
    global _several
    if _several is None:
        assert _make is not None
        _several = _make()
    return _several


def runs_distributed() -> bool:
    """Whether a process group is initialized, or torchrun started this process."""
    from torch import distributed

    if not distributed.is_available():
        return False
    return distributed.is_initialized() or distributed.is_torchelastic_launched()


def world() -> World:
    """Return what this process does where several may hold one model."""
    return many_ranks() if runs_distributed() else _SINGLE


def world_of(model: nn.Module) -> World:
    """Return `world()`, or several ranks' for a model that `prepare_sharding` has laid out."""
    from .packing.decoders import is_shardable

    if runs_distributed() or any(map(is_shardable, model.modules())):
        return many_ranks()
    return _SINGLE
