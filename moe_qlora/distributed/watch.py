"""Checks, before each forward, that no engine has taken the experts of ranks for copies.

DDP writes the first rank's parameters over all others', and FSDP2 shards what it takes for equal
everywhere. Both are told to leave a rank's experts alone, but DDP asks the module that it wraps,
which another wrapper may hide, and FSDP2 takes a list from its caller.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..errors import ConfigError, QuantizationError
from ..packing import parametrize
from ..packing.shares import ExpertShare, share_of
from .gathered_dispatch import host_group

_SAMPLE = 512  # bytes of the first weight's codes, by which ranks are told apart


class _Watch:
    """The codes of a model's first divided weight as they were, and as the first rank's were."""

    def __init__(self, module: nn.Module, leaf: str) -> None:
        self.module, self.leaf = module, leaf
        own = self.sample()
        self.first_rank = own.clone()
        distributed.broadcast(self.first_rank, src=0)
        self.differs = not torch.equal(own, self.first_rank)
        self.version: int | None = None

    def sample(self) -> Tensor:
        codes = parametrize.read_packed(self.module, self.leaf).flat_codes
        return codes[:_SAMPLE].clone()


def watch(model: nn.Module) -> None:
    """Check a divided model before each of its forwards; all ranks must call it."""
    for _, module, leaf in parametrize.iter_packed(model):
        share = share_of(module)
        if share is not None:
            state = _Watch(module, leaf)
            model.register_forward_pre_hook(partial(_check, state))
            model.register_forward_pre_hook(partial(_check_batch, share), with_kwargs=True)
            _group_of(share)  # made by all ranks in one order
            return


def _group_of(share: ExpertShare) -> Any:
    return host_group(share.mesh.get_group(share.mesh.ndim - 1))


def _check_batch(share: ExpertShare, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise on every rank where one has no tokens, for which the others would wait in the experts.

    The host's own all-reduce, once a forward: the dispatch makes one in each layer.
    """
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    empty = bool(inputs) and not inputs[0].numel()
    first = torch.tensor([distributed.get_rank() + 1 if empty else 0])
    distributed.all_reduce(first, distributed.ReduceOp.MAX, group=_group_of(share))
    if int(first):
        raise ConfigError(
            f"rank {int(first) - 1} has an empty batch: with experts divided over ranks, each rank "
            "runs a batch of its own with one token or more (dataloader_drop_last=True leaves out "
            "the last batches that do not fill all ranks)."
        )


def _check(state: _Watch, *args: Any) -> None:
    if not parametrize.is_packed(state.module, state.leaf):
        return
    codes: Any = parametrize.original_of(state.module, state.leaf)
    if hasattr(codes, "device_mesh"):
        raise QuantizationError(
            f"The packed {state.leaf} of a rank's own experts was sharded as if all ranks held the "
            "same: pass ignored_params=moe_qlora.expert_parallel_parameters(model) to every call "
            "of fully_shard."
        )
    # Writing in place counts up; to compare at each forward would wait for the device.
    if codes._version != state.version:
        state.version = codes._version
        if state.differs and torch.equal(state.sample(), state.first_rank.to(codes.device)):
            raise QuantizationError(
                f"The packed {state.leaf} of this rank's experts was overwritten with the first "
                "rank's: load the model again, and give DistributedDataParallel the PeftModel "
                "itself, whose _ddp_params_and_buffers_to_ignore names what it must leave alone."
            )
