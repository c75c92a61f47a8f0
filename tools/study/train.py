"""The study's models: their size, their data, and how all of them are trained and judged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 4096


@dataclass(frozen=True)
class Scale:
    """How large the study is.

    Attributes:
        hidden, layers, experts: Sizes of the model; an expert is as wide as the model.
        length: Tokens in a row.
        base_batch, base_steps, base_rate: Rows in a step of the base's training, its steps at most
            and its learning rate.
        batch, steps, rate: The same of fine-tuning.
        held_rows: Rows that each held-out loss is the mean of, at most.
    """

    hidden: int = 256
    layers: int = 4
    experts: int = 32
    length: int = 256
    base_batch: int = 64
    base_steps: int = 4000
    base_rate: float = 2e-3
    batch: int = 32
    steps: int = 200
    rate: float = 2e-3
    held_rows: int = 256


TOY = Scale(
    hidden=64,
    layers=2,
    experts=8,
    length=32,
    base_batch=16,
    base_steps=60,
    batch=8,
    steps=12,
    held_rows=32,
)


class OutOfTimeError(Exception):
    """The deadline came before a run was through."""


@dataclass(frozen=True)
class Data:
    """Tokens by name: "code" and "text" to train on, "code_held" and "text_held" to judge by."""

    tokens: dict[str, Tensor]
    scale: Scale
    device: torch.device

    @classmethod
    def read(cls, file: Path, scale: Scale, device: torch.device) -> Data:
        """Read a corpus that corpus.py wrote."""
        with np.load(file) as arrays:
            tokens = {name: torch.from_numpy(arrays[name].astype(np.int64)) for name in arrays}
        return cls({name: each.to(device) for name, each in tokens.items()}, scale, device)

    def batches(self, name: str, rows: int, seed: int) -> Iterator[Tensor]:
        """Yield random rows of tokens without end, `(rows, length)`."""
        tokens, length = self.tokens[name], self.scale.length
        generator = torch.Generator().manual_seed(seed)
        span = torch.arange(length, device=self.device)
        while True:
            starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
            yield tokens[starts.to(self.device) + span]

    def held(self, name: str) -> Tensor:
        """Return the held-out rows of "code" or "text", one after the other, `(N, length)`."""
        tokens, length = self.tokens[f"{name}_held"], self.scale.length
        rows = min(len(tokens) // length, self.scale.held_rows)
        return tokens[: rows * length].view(rows, length)


def new_model(scale: Scale, device: torch.device) -> Any:
    """Return a Qwen3-MoE language model with weights drawn at random, in bf16 on a GPU."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=scale.hidden,
        intermediate_size=2 * scale.hidden,
        moe_intermediate_size=scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=scale.hidden // 4,
        num_experts=scale.experts,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=2 * scale.length,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    return prepare(model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32))


def prepare(model: Any) -> Any:
    """Let 16-bit experts be computed by torch's grouped matmul on a GPU."""
    on_gpu = next(model.parameters()).is_cuda
    model.set_experts_implementation("grouped_mm" if on_gpu else "eager")
    return model


def autocast(device: torch.device) -> Any:
    """Return the block that every forward runs in: bf16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train_base(model: Any, data: Data, seed: int, stop: float) -> tuple[int, list[float]]:
    """Train a model from scratch on code; return the number of steps, and 40 losses on the way.

    Weights are bf16 and the optimizer has fp32 ones. The learning rate falls to zero with the steps
    or with the time until `stop`, whichever is further on.
    """
    scale, device = data.scale, data.device
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [w.detach().float().clone() for w in weights]
    optimizer = torch.optim.AdamW(
        masters, lr=scale.base_rate, betas=(0.9, 0.95), weight_decay=0.05,
        fused=device.type == "cuda",
    )  # fmt: skip
    begin, losses, step = time.time(), [], 0
    model.train()
    for batch in data.batches("code", scale.base_batch, seed):
        progress = max(step / scale.base_steps, (time.time() - begin) / max(stop - begin, 1e-9))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = scale.base_rate * min((step + 1) / 50, 1.0, 1.25 * (1 - progress))
        with autocast(device):
            out = model(input_ids=batch, labels=batch, use_cache=False, output_router_logits=True)
        out.loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        if step % max(scale.base_steps // 40, 1) == 0:
            losses.append(round(out.loss.item(), 4))
        step += 1
    return step, losses


def fine_tune(
    model: Any, data: Data, seed: int, rate: float, steps: int, deadline: float
) -> list[float]:
    """Train what requires gradients on text; return some 20 losses on the way.

    Raises:
        OutOfTimeError: The deadline came first.
    """
    device = data.device
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0, fused=device.type == "cuda")
    schedule: Callable[[int], float] = lambda step: min(  # noqa: E731
        (step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / steps)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses = []
    model.train()
    batches = data.batches("text", data.scale.batch, 1000 + seed)
    for step, batch in zip(range(steps), batches, strict=False):
        with autocast(device):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(steps // 20, 1) == 0:
            losses.append(round(loss.item(), 4))
        if time.time() > deadline:
            raise OutOfTimeError
    return losses


@torch.no_grad()
def token_losses(model: Any, data: Data, name: str) -> Tensor:
    """Return the loss of every held-out token but each row's first, `(N, length - 1)`, fp32."""
    model.eval()
    losses = []
    for rows in data.held(name).split(32):
        with autocast(data.device):
            logits = model(input_ids=rows, use_cache=False).logits
        losses.append(
            F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none"
            ).view(len(rows), -1)
        )
    return torch.cat(losses).cpu()
