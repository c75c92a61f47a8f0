"""A training loop for tests whose ranks divide every batch, as plain loops do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **options)


def train(
    model: Any,
    batches: Iterable[Tensor],
    rank: int = 0,
    world: int = 1,
    *,
    group: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    after_backward: Callable[[int], None] | None = None,
) -> list[float]:
    """Train a step on this rank's rows of each batch of token ids; return the ranks' mean losses.

    `after_backward` is called with the number of the step, before that of the optimizer.
    """
    model.train()
    optimizer = optimizer or adamw(model)
    losses = []
    for step, ids in enumerate(batches):
        own = ids.chunk(world)[rank]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        if after_backward is not None:
            after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of_ranks(loss, world, group))
    return losses


def mean_of_ranks(value: Tensor, world: int, group: Any = None) -> float:
    mean = value.detach().float().clone()
    if world > 1:
        distributed.all_reduce(mean, group=group)
    return float(mean) / world


def whole(tensor: Any) -> Tensor:
    """A DTensor gathered, and any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by name, without the prefix of `DistributedDataParallel`."""
    return {
        name.removeprefix("module."): whole(parameter.grad).float().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
