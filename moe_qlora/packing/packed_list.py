"""torch's `ParametrizationList` of a packed weight, and the seam for weights in host memory.

Where a list has a `host`, the module's own tensors are views of host memory, which all that saves,
merges or copies reads. A forward or backward reads by `host.fetch`, compiled code by a handle.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.utils.parametrize as P
from torch import Tensor, nn

from ..errors import ConfigError, QuantizationError
from ..kernels.weights import PackedWeight
from ..layout import human_bytes
from .codec import unpack
from .decoders import (
    Packed4bit,
    Params4bit,
    QuantState,
    from_quant_state,
    params4bit,
    read,
    to_quant_state,
)
from .settings import CodecSettings

_MOVED = "_moe_qlora_moved"
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, PackedList] = weakref.WeakValueDictionary()


class PackedList(P.ParametrizationList):
    """A ParametrizationList whose codes can go to the meta device and come back empty."""

    # Where the weight lies that is not on the device that computes with it (speed/offload.py)
    host: Any = None
    offload: object | None = None  # What had it in host memory first, and may again
    moves: int = 0  # How often it went to host memory, or came back
    handle: Tensor  # `()` int64 on the CPU, of `fetch_by`, while it is in host memory

    def settle(self, host: Any) -> None:
        """Note where the weight lies now: None for the module's own device."""
        self.host, self.moves = host, self.moves + 1
        if host is None:
            del self.host
            return
        number = next(_numbers)
        _by_number[number] = self
        with torch.inference_mode(False):
            self.handle = torch.tensor(number, device="cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if self.host is not None:
            self.host.move(fn(torch.empty(0, dtype=torch.uint8, device=self.host.device)).device)
            return self
        cross_meta(self, "original", fn)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedList:
        """Return a copy, of what lies in host memory one on the device that computes."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        held = {k: value for k, value in self.__dict__.items() if k not in ("host", "offload")}
        new.__dict__.update(copy.deepcopy(held, memo))
        if isinstance(new.original, Params4bit) and isinstance(new[0], Packed4bit):
            new.original.quant_state = new[0].quant_state
        if self.host is not None and not new.original.is_meta:  # as a copy to meta has them
            new.to(self.host.device)
        return new

    def forward(self) -> Tensor:
        """Return the dequantized weight, on the device that computes."""
        return super().forward() if self.host is None else _unpacked(self)

    def __repr__(self) -> str:
        """Return one line for `print(model)`: codec, shape and dtype of the weight, its bytes."""
        try:
            packed = read(self.original, self._modules["0"])
        except QuantizationError:  # codes that were cast
            return super().__repr__()
        dtype = str(packed.dtype).removeprefix("torch.")
        codec, where = CodecSettings.of(packed).describe(), "" if self.host is None else ", on host"
        nbytes = human_bytes(packed.nbytes)
        return f"Packed({codec}, {tuple(packed.shape)} {dtype}, {nbytes}{where})"


def fetch_by(handle: Tensor) -> PackedWeight:
    """Return the weight on the device that computes, by the handle that compiled code has of it."""
    return fetched(_by_number[int(handle)])


def fetched(chain: Any) -> PackedWeight:
    """Return the weight on the device that computes, wherever it lies by now.

    One that lies in host memory is fetched: nobody may save its tensors for a backward.
    """
    host = getattr(chain, "host", None)
    if host is not None:
        return cast(PackedWeight, host.fetch(chain))
    packed = read(chain.original, chain[0])
    if hasattr(chain.original, "ds_id"):
        packed.again = partial(fetched, chain)
    return packed


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _unpacked(chain: PackedList) -> Tensor:
    """Return what `ParametrizationList.forward` does of a weight in host memory."""
    with torch.no_grad():
        weight = unpack(fetched(chain))
    for key in range(1, len(chain)):
        weight = chain[key](weight)
    return weight


def refuse_hosted(packed_list: Any, name: str) -> None:
    """Raise where a weight that would be replaced lies in host memory."""
    if getattr(packed_list, "host", None) is not None:
        raise ConfigError(
            f"{name} lies in host memory, by offload_experts, and cannot be replaced, merged or "
            "sharded there: call remove() on what offload_experts returned first."
        )


def cross_meta(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Replace a `Params4bit` that `fn` would move to or from meta, which torch cannot do.

    Codes and statistics have no values afterwards.
    """
    old: Any = module._parameters.get(name)
    if not isinstance(old, Params4bit) or old.quant_state is None:
        return
    device = fn(torch.empty(0, dtype=old.dtype, device=old.device)).device
    if old.is_meta == (device.type == "meta"):
        return
    moved = old.__dict__.get(_MOVED)  # by another module with the same parameter
    if moved is None or moved.device != device:
        state = old.quant_state
        if type(state) is QuantState:  # of a Linear layer; a decoder's moves by itself
            packed = from_quant_state(old.data, state)
            blank = to_quant_state(packed.map(partial(torch.empty_like, device=device)))
            state.__dict__.update(blank.__dict__)
        moved = params4bit(torch.empty_like(old.data, device=device), state, type(old))
        old.__dict__[_MOVED] = moved
    module._parameters[name] = moved
