"""The interface between one process and many ranks of one model.

    world()             a `World` for a single process, or that of several ranks
                        (distributed/ranks.py) if torch runs several
    world_of(model)     the same; that of several ranks also for a model laid out for them

No other room imports distributed/: the package's `__init__` provides it here. torch is imported on
first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_Result = TypeVar("_Result")

NOT_GIVEN: Final[Any] = object()
"""Default of a `state_dict` argument, different from None."""

CHECKED = "_moe_qlora_checked"  # attribute of a model: result of `before_forward`


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of a state dict: its whole dtype and shape, and how it is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None  # None: known after gathering
    source: Any  # the state dict's value: the tensor itself, or this rank's share
    gather: Callable[[], Tensor]  # if `divided`, all ranks must call it
    divided: bool


class World:
    """A single process with the whole model."""

    several = False

    @property
    def first(self) -> bool:
        """True if this process writes files."""
        return True

    def lay_out(self, model: nn.Module) -> None:
        """Give packed weights a layout that engines of many GPUs can shard."""

    def device(self) -> int | None:
        """Return the index of this rank's CUDA device; None for the current one."""
        return None

    def prepare_adapters(self, model: nn.Module, config: Any) -> None:
        """Lay a model out before it gets adapters; raise if it is too late for them."""

    def follow_adapters(self, model: nn.Module) -> None:
        """Prepare the factors of new adapters for engines and ranks."""

    def check_unsharded(self, model: nn.Module, action: str, advice: str) -> None:
        """Raise an `AdapterError` if weights are sharded, and `action` needs whole ones."""

    def before_forward(self, model: nn.Module) -> None:
        """Check the changes by engines to a packed model, once, before its first forward."""

    def stock_class(self, module: nn.Module) -> type:
        """Return the class of a module before an engine replaced it."""
        return type(module)

    def state_dict_to_save(self, model: nn.Module, given: Any) -> Mapping[str, Any] | None:
        """Return the given state dict, or the model's; None if this rank does not take part."""
        if given is None or given is NOT_GIVEN:
            return cast("Mapping[str, Any]", model.state_dict())
        return cast("Mapping[str, Any]", given)

    def is_divided(self, model: nn.Module, state_dict: Mapping[str, Any]) -> bool:
        """True if this state dict is divided over ranks."""
        return False

    def plain_tensor(self, value: Any) -> WholeTensor:
        """Describe a tensor that is no part of a packed weight."""
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
_offloading: Callable[[], Callable[[nn.Module], Any]] | None = None


def provide(make: Callable[[], World]) -> None:
    """Set the constructor of the `World` of several ranks, called on first use."""
    global _make
    _make = make


def provide_offloading(make: Callable[[], Callable[[nn.Module], Any]]) -> None:
    """Set what returns `offload_experts`, for loads into host memory."""
    global _offloading
    _offloading = make


def offload(model: nn.Module) -> None:
    """Move a model's packed experts to host memory."""
    assert _offloading is not None
    _offloading()(model)


def many_ranks() -> Any:
    """Return the `World` of several ranks, even if torch runs one."""
    global _several
    if _several is None:
        assert _make is not None
        _several = _make()
    return _several


def runs_distributed() -> bool:
    """True if a process group is initialized, or torchrun started this process."""
    from torch import distributed

    if not distributed.is_available():
        return False
    return distributed.is_initialized() or distributed.is_torchelastic_launched()


def world() -> World:
    """Return the `World` of this process."""
    return many_ranks() if runs_distributed() else _SINGLE


def world_of(model: nn.Module) -> World:
    """Return `world()`, or several ranks' for a model that `prepare_sharding` has laid out."""
    from .packing.decoders import is_shardable

    if runs_distributed() or any(map(is_shardable, model.modules())):
        return many_ranks()
    return _SINGLE
