"""Lets FSDP2 gather a decoder layer at the same addresses each time, which CUDA graphs need.

FSDP2 allocates what it gathers in each forward and backward, and frees it after. It gathers one
layer at a time, so layers of the same sizes share memory here that stays allocated. One kept until
its backward has its own, stays until gradients are reduced, and gathers frozen weights once.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

Buffer = Callable[[Hashable, Tensor], Tensor]
"""Returns memory of a tensor's shape and dtype: the same for all that ask for one role."""


class FixedGather:
    """A layer that FSDP2 gathers in memory that is not freed, until `undo`."""

    def __init__(self, group: Any, buffer: Buffer) -> None:
        self._group, self._params = group, group.fsdp_params
        outputs = [output for param in self._params for output in param.all_gather_outputs]
        shares = group._reshard_after_forward
        role: Hashable = None if shares else id(group)
        role = role, *((output.numel(), output.dtype) for output in outputs)
        shared = [buffer(("gathered", i, role), output) for i, output in enumerate(outputs)]
        self._first: Any = shared[0]
        self.is_fixed = not self._is_taken()
        if self.is_fixed:
            self._put(shared)
            self._take()
            for param in self._params:
                param.free_unsharded_param = lambda: None
            self._params[0].alloc_all_gather_outputs = self._take
            if not shares:
                trained = [p for p in self._params if p.sharded_param.requires_grad]
                self._trained = self._gathering = trained or self._params
                self._frozen = [p for p in self._params if p not in self._trained]
                self._there: Any = self._versions() if group.is_unsharded else None
                group.reshard, group._to_sharded = self._reshard, self._to_sharded
                group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard

    @property
    def address(self) -> int:
        return int(self._params[0].all_gather_outputs[0].data_ptr())

    def _is_taken(self) -> bool:
        """Whether another layer is gathered there now, as after `unshard()` of both."""
        holder = getattr(self._first, "holder", self._group)
        return holder is not self._group and bool(holder.is_unsharded)

    def _take(self) -> None:
        if self._is_taken():
            self.undo()
            self._params[0].alloc_all_gather_outputs()
        else:
            self._first.holder = self._group

    def _reshard(self) -> None:
        # A micro-batch that reduces no gradients changes no weight: the next one uses the same
        group = self._group
        if group.reduce_grads or group._training_state.name != "POST_BACKWARD":
            type(group).reshard(group)

    def _versions(self) -> list[tuple[int, int, int]]:
        """Return what changes as frozen weights are changed in place, or replaced."""
        shares = (p.sharded_param for p in self._frozen)
        return [(id(share), share._version, share._local_tensor._version) for share in shares]

    def _to_sharded(self) -> None:
        # FSDP2 calls it for a state dict also, into which a checkpoint is loaded unseen
        if self._group._training_state.name == "IDLE":
            self._there = None
        type(self._group)._to_sharded(self._group)

    def _unshard(self, async_op: bool = False) -> None:
        group, versions = self._group, self._versions()
        if group.is_sharded and group._all_gather_result is None:
            self._gathering = self._trained if versions == self._there else self._params
            self._there = versions
        group.fsdp_params = self._gathering
        type(group).unshard(group, async_op)
        group.fsdp_params = self._params

    def _wait_for_unshard(self) -> None:
        group, waits = self._group, self._group._all_gather_result is not None
        group.fsdp_params = self._gathering
        type(group).wait_for_unshard(group)
        group.fsdp_params = self._params
        for param in self._frozen if waits else ():
            param.to_unsharded()

    def _put(self, memory: list[Tensor]) -> None:
        for param, place in zip(self._params, memory, strict=True):
            whole = param._unsharded_param
            if self._group.is_unsharded:
                place.copy_(param.all_gather_outputs[0])
            param.all_gather_outputs = [place]
            whole.data = place.as_strided(whole.shape, whole.stride())

    def undo(self) -> None:
        """Let FSDP2 allocate and free the layer's memory again."""
        if not self.is_fixed:
            return
        self.is_fixed = False
        for param in self._params:
            del param.free_unsharded_param
        del self._params[0].alloc_all_gather_outputs
        for name in ("reshard", "_to_sharded", "unshard", "wait_for_unshard"):
            vars(self._group).pop(name, None)
        self._put([torch.empty_like(param.all_gather_outputs[0]) for param in self._params])
        if self._group.is_sharded:
            for param in self._params:
                param.free_unsharded_param()


def _group_of(layer: nn.Module) -> Any:
    return layer._get_fsdp_state()._fsdp_param_group if isinstance(layer, FSDPModule) else None


def fix_gather(layer: nn.Module, buffer: Buffer) -> FixedGather | None:
    """Fix the addresses of a layer that is gathered now; None if FSDP2 gathers it with others."""
    group = _group_of(layer)
    is_whole = group is None or group.fsdp_params[0].sharded_param.device_mesh.size(-1) == 1
    return None if is_whole else FixedGather(group, buffer)


def gathered_nbytes(module: nn.Module) -> int:
    """Return the bytes that FSDP2 gathers for a module by itself, 0 if it does not."""
    return sum(p.sharded_param.nbytes for p in getattr(_group_of(module), "fsdp_params", ()))


def is_gathered_twice(layer: nn.Module) -> bool:
    """Whether FSDP2 gathers a layer for its forward, and from all ranks again for its backward."""
    group = _group_of(layer)
    return group is not None and group._reshard_after_forward and not group._use_post_forward_mesh


def keep_root(model: nn.Module, kept: bool = True) -> None:
    """Let the root's own weights, which a step's peak holds anyway, stay if none is trained."""
    group = _group_of(model)
    if group is None or any(param.sharded_param.requires_grad for param in group.fsdp_params):
        return
    if kept:
        group.reshard = lambda: group._training_state.name == "IDLE" and type(group).reshard(group)
    else:
        vars(group).pop("reshard", None)
        group.reshard()
