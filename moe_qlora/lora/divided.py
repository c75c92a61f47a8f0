"""LoRA of experts that are divided over ranks: each rank holds its own experts' factors.

A factor is a DTensor of the shape that PEFT's file has, of which a rank holds its experts' part:
rows of `lora_A`, where the expert is slowest, and in `lora_B`, where it is fastest, one run of
columns for each rank of the adapter. Gradient norms, optimizers and files so count each expert
once, without being told.

Each expert sees the tokens of all ranks that share a copy of it: its gradient is summed over the
copies and divided by the number of batches, as DDP and FSDP2 average all others.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from ..errors import AdapterError
from ..packing.shares import ExpertShare, first_share


def divided_factors(
    a: nn.Parameter, b: nn.Parameter, share: ExpertShare
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return this rank's part of the whole `lora_A` `(E r, in)` and `lora_B` `(out, r E)`."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    rank = a.shape[0] // share.experts
    rows = a.detach().view(share.experts, rank, -1)[share.first : share.last]
    columns = b.detach().view(len(b), rank, share.experts)[:, :, share.first : share.last]
    return (
        _divided(a, rows.flatten(0, 1), Shard(0), share),
        _divided(b, columns.flatten(1), _StridedShard(1, split_factor=rank), share),
    )


def _divided(
    whole: nn.Parameter, local: Tensor, placement: Any, share: ExpertShare
) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Replicate

    from .factor_tensor import DividedTensor

    placements = [*[Replicate()] * (share.mesh.ndim - 1), placement]
    # A copy, so that the whole factor is freed.
    part = DTensor.from_local(
        local.clone(), share.mesh, placements, run_check=False,
        shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    return nn.Parameter(DividedTensor.of(part), requires_grad=whole.requires_grad)


def is_divided(factor: Tensor) -> bool:
    """Whether a LoRA factor is a DTensor."""
    return hasattr(factor, "placements")


def local_factor(factor: Tensor, share: ExpertShare) -> Tensor:
    """Return this rank's part of a factor, whose gradient will be averaged over all batches."""
    if not is_divided(factor):
        return factor
    if factor.requires_grad:
        return cast(Tensor, _AverageGradient.apply(factor, share))
    return cast(Tensor, cast(Any, factor).to_local())


def check_whole(model: nn.Module, what: str) -> None:
    """Raise where a model's experts are divided over ranks, of which none can do this."""
    if first_share(model) is not None:
        raise AdapterError(
            f"{what} needs all experts, and this model's are divided over ranks: save the adapter "
            "on all ranks, and go on from its folder, such as with moe-qlora merge."
        )


class _AverageGradient(torch.autograd.Function):
    """Gives this rank's part of a factor, and averages its gradient over the batches of all ranks.

    In backward and not in a hook: a hook on the parameter is lost where that is replaced, and one
    after its accumulation would divide what earlier micro-batches have left there.
    """

    @staticmethod
    def forward(ctx: Any, factor: Any, share: ExpertShare) -> Tensor:
        ctx.share, ctx.spec = share, factor._spec
        local: Tensor = factor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        averaged = grad / ctx.share.batches
        if ctx.share.copies is not None:
            distributed.all_reduce(averaged, group=ctx.share.copies)
        part: Any = DTensor(averaged, ctx.spec, requires_grad=False)
        return part, None
