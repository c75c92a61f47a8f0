"""The training loop that whole models are measured by: random batches, AdamW on the adapters."""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chats import Batch, batches, with_loss
from common import Rows, allocated, release, synchronize
from torch import Tensor

LORA_RATE = 1e-4


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
}


def train(
    model: Any,
    loss_of: Callable[[Any, Batch], Tensor],
    options: argparse.Namespace,
    device: torch.device,
    rows: Rows,
) -> None:
    """Train on batches of `--data`; records time, tokens/s and memory, and the losses asked for.

    Raises:
        RuntimeError: A loss is not finite, or an adapter gets no gradient.
    """
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows.add("trained weights", "weights", sum(parameter.numel() for parameter in parameters))
    optimizer = OPTIMIZERS[options.optimizer](parameters, lr=LORA_RATE)
    autocast = options.adapters == "fp32"
    release(device)
    if device.type == "cuda":
        rows.add("model and adapters", "bytes", allocated(device))
    seconds: list[float] = []
    losses: list[float] = []
    counts: list[tuple[int, int]] = []  # Tokens computed, and those with a loss
    vocabulary = model.config.get_text_config().vocab_size

    def step(batch: Batch, first: bool = False) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        if first:
            _check_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return loss.detach()

    for batch in batches(options.data, vocabulary, options, device):
        counts.append((batch["input_ids"].numel(), with_loss(batch)))
        synchronize(device)
        start = time.perf_counter()
        loss = step(batch, first=not losses)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    seconds, counts = seconds[options.warmup :], counts[options.warmup :]
    rows.add("step", "s", *seconds)
    timed = [*zip(counts, seconds, strict=True)]
    rows.add("throughput", "tokens/s", *(tokens / step for (tokens, _), step in timed))
    if options.data != "fixed":  # Of batches that differ: all tokens over all seconds
        rate = sum(count for _, count in counts) / sum(seconds)
        rows.add("throughput with loss", "tokens/s", rate)
    rows.add("first loss", "nats", losses[0])
    rows.add("last loss", "nats", losses[-1])
    for index, value in enumerate(losses[: options.losses]):
        rows.add(f"loss of step {index}", "nats", value)
    if device.type == "cuda":
        rows.add("peak in training", "bytes", torch.cuda.max_memory_allocated(device))
        rows.add("reserved in training", "bytes", torch.cuda.max_memory_reserved(device))
        rows.add("resident between steps", "bytes", allocated(device))
    if options.profile:
        _profile(partial(step, batch), device, options.profile)


def _profile(step: Callable[[], Tensor], device: torch.device, path: Path) -> None:
    """Write when each kernel of one more step began, how long it took and its name."""
    where = device.type.upper()
    activity = getattr(torch.profiler.ProfilerActivity, where)
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
    kernels = [event for event in profile.events() if event.device_type.name == where]
    kernels.sort(key=lambda event: event.time_range.start)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["start_us", "us", "kernel"])
        for kernel in kernels:
            start = kernel.time_range.start - kernels[0].time_range.start
            table.writerow([f"{start:.1f}", f"{kernel.time_range.elapsed_us():.1f}", kernel.name])


def _check_gradients(model: Any) -> None:
    """Every LoRA B must get a gradient (A gets none while B is zero)."""
    dead = [
        name
        for name, parameter in model.named_parameters()
        if "lora_B" in name and (parameter.grad is None or not parameter.grad.any())
    ]
    if dead:
        raise RuntimeError(f"{len(dead)} LoRA weights get no gradient, the first is {dead[0]}")
