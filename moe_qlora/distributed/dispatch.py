"""An expert-parallel dispatch for few ranks: all of them get all tokens, and sum what they compute.

transformers' all-to-all sends each token once for each of its k experts, sorted by owner, and reads
the counts back to the host in every layer. With N ranks of at most k, a token has experts on nearly
every rank: gathering the hidden states moves (N - 1) / k as many bytes, nothing is sorted or
scattered, and no layer waits for the host. Two H200s,
Qwen3-30B-A3B, 16 layers, 16,384 tokens a rank: 0.600 s a step instead of 0.866
(tools/bench/results/two_gpu.csv). Rows of other ranks' experts are skipped by the experts forward,
which takes memory for them all the same: so it is used for few ranks.

Before each forward, `watch` checks that no engine has taken the experts of ranks for copies:
DDP writes the first rank's parameters over all others', and FSDP2 shards what it takes for equal
everywhere. Both are told to leave a rank's experts alone, but DDP asks the module that it wraps,
which another wrapper may hide, and FSDP2 takes a list from its caller.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad
from transformers.distributed.expert_parallel import AutoEP, EPImplementationInterface

from ..errors import ConfigError, QuantizationError
from ..packing import parametrize
from .shares import ExpertShare, expert_share

NAME = "moe_qlora"
_SAMPLE = 512  # bytes of the first weight's codes, by which ranks are told apart
MOST_RANKS = 4
"""Ranks up to which memory for rows of other ranks' experts is taken."""


def register() -> str:
    """Register the dispatch with transformers, and return its name there."""
    if NAME not in EPImplementationInterface():
        EPImplementationInterface.register(NAME, GatheredDispatch)
    return NAME


class GatheredDispatch(AutoEP):
    """transformers' automatic choice, with gathered tokens in training on few ranks."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.group = ep_mesh.get_group()
        self.host_group = host_group(self.group)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        ranks = self.ep_mesh.size()
        if self.shares_batch or self.tp_mesh.size() > 1 or ranks > MOST_RANKS:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        if top_k_index.shape[-1] < ranks:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        tokens = hidden_states.shape[0]
        missing = _longest(tokens, self.host_group) - tokens
        held = self.num_local_experts
        if missing:
            hidden_states, top_k_weights = (
                pad(tensor, (0, 0, 0, missing)) for tensor in (hidden_states, top_k_weights)
            )
            top_k_index = pad(top_k_index, (0, 0, 0, missing), value=ranks * held)
        index = top_k_index.new_empty(ranks * len(top_k_index), top_k_index.shape[1])
        distributed.all_gather_into_tensor(index, top_k_index.contiguous(), group=self.group)
        states = _Gather.apply(hidden_states, self.group)
        weights = _Gather.apply(top_k_weights, self.group)
        index = index - self.ep_mesh.get_local_rank() * held
        elsewhere = (index < 0) | (index >= held)
        index = index.masked_fill(elsewhere, held)
        out = self.experts_forward(states, index, weights.masked_fill(elsewhere, 0))
        return _ReduceScatter.apply(out, self.group)[:tokens]


_host_groups: dict[Any, Any] = {}
"""By process group: a gloo group of the same ranks."""


def host_group(group: Any) -> Any:
    """Return a gloo group of the same ranks, so that counts of tokens need not wait for the GPU.

    All ranks of the whole run must call it in the same order.
    """
    if group not in _host_groups:
        everyone: list[Any] = [None] * distributed.get_world_size()
        ranks = tuple(distributed.get_process_group_ranks(group))
        distributed.all_gather_object(everyone, ranks)
        for each in sorted(set(everyone)):
            made = distributed.new_group(each, backend="gloo")
            if each == ranks:
                _host_groups[group] = made
    return _host_groups[group]


def _longest(tokens: int, group: Any) -> int:
    """Return the largest number of tokens that a rank of the group has."""
    counts = torch.tensor([tokens])
    distributed.all_reduce(counts, distributed.ReduceOp.MAX, group=group)
    return int(counts)


class _Gather(torch.autograd.Function):
    """Gathers rows of all ranks; in backward each gets the sum of its rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """Sums what all ranks have computed for each token, for the rank whose token it is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gathered(grad, ctx.group), None


def _gathered(rows: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    out = rows.new_empty(ranks * rows.shape[0], *rows.shape[1:])
    distributed.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def _summed(rows: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    out = rows.new_empty(rows.shape[0] // ranks, *rows.shape[1:])
    distributed.reduce_scatter_tensor(out, rows.contiguous(), group=group)
    return out


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
        share = expert_share(module)
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
