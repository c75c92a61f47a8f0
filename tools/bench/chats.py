"""Batches that `model.py --data` trains on, and their losses: token ids are random in each.

    fixed    all of `--seq` tokens, each with a loss
    longest  chats of mixed lengths, padded to the longest of the batch, as collators do
    padded   the same, padded to `--seq`, so that all batches have one shape
    packed   chats one after the other in rows of `--seq` tokens; positions start anew with each, by
             which transformers keeps attention apart. A row of one chat has no mask, and is
             compiled for itself: the first two batches are such
    dpo      pairs of a chosen and a rejected answer to one prompt, padded to `--seq`; the reference
             is the model without its adapter. `--micro-batch` counts pairs
    grpo     answers to prompts, padded to `--seq`, with advantages; log-probabilities of before the
             step are computed by the same model, and answers are taken to be there already

A chat has a prompt without a loss, a third of it on average, and lengths are log-normal: a median
of 512 tokens, a tenth over 1,700 (no data set is here to take them from). What is compared is the
rate of tokens that carry a loss.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_qlora.integrations.objectives import log_probabilities

Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]

MEDIAN, SPREAD = 512, 0.94
LEAST = 16  # Tokens of a chat
IGNORED = -100
_SINGLE = 2
"""Batches of one chat a row, at the start of packed ones: the second of a kind is recorded."""
BETA, CLIP = 0.1, 0.2  # TRL's defaults of DPO and of GRPO


def batches(
    kind: str, vocabulary: int, options: argparse.Namespace, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of all steps, the same for each peer."""
    generator = torch.Generator().manual_seed(1)
    for step in range(options.warmup + options.steps):
        make = _single if kind == "packed" and step < _SINGLE else KINDS[kind]
        made = make(vocabulary, options.micro_batch, options.seq, generator)
        yield {name: tensor.to(device) for name, tensor in made.items()}


def sequences(options: argparse.Namespace) -> int:
    """Return the rows of a batch."""
    rows: int = options.micro_batch
    return 2 * rows if options.data == "dpo" else rows


def with_loss(batch: Batch) -> int:
    """Return how many tokens of a batch carry a loss; the first of a row cannot."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def _fixed(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(vocabulary, (rows, seq), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _chat(vocabulary: int, seq: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return a chat's ids, and the length of its prompt."""
    normal = float(torch.randn((), generator=generator))
    length = min(max(int(MEDIAN * math.exp(SPREAD * normal)), LEAST), seq)
    part = 0.1 + 0.46 * float(torch.rand((), generator=generator))
    ids = torch.randint(vocabulary, (length,), generator=generator)
    return ids, max(1, int(part * length))


def _rows(chats: list[tuple[Tensor, int]], seq: int) -> Batch:
    ids = torch.zeros(len(chats), seq, dtype=torch.long)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, (chat, prompt) in enumerate(chats):
        ids[row, : len(chat)], mask[row, : len(chat)] = chat, 1
        labels[row, prompt : len(chat)] = chat[prompt:]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _longest(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    chats = [_chat(vocabulary, seq, generator) for _ in range(rows)]
    return _rows(chats, max(len(ids) for ids, _ in chats))


def _padded(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    return _rows([_chat(vocabulary, seq, generator) for _ in range(rows)], seq)


def _packed(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    made: list[list[Tensor]] = []
    for _ in range(rows):
        parts, left = [], seq
        while left:
            ids, prompt = _chat(vocabulary, max(left, LEAST), generator)
            ids, labels = ids[:left], ids[:left].clone()
            labels[:prompt] = IGNORED
            parts.append(torch.stack([ids, labels, torch.arange(len(ids))]))
            left -= len(ids)
        made.append(list(torch.cat(parts, 1)))
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.stack([row[i] for row in made]) for i, name in enumerate(names)}


def _single(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    """Rows of one chat each."""
    ids = torch.randint(vocabulary, (rows, seq), generator=generator)
    labels = ids.clone()
    labels[:, : seq // 3] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(seq).expand(rows, seq)}


def _pairs(vocabulary: int, rows: int, seq: int, generator: torch.Generator) -> Batch:
    """Chosen answers in the first half of the rows, rejected ones in the second."""
    chats = [_chat(vocabulary, seq, generator) for _ in range(rows)]
    rejected = []
    for ids, prompt in chats:
        other = torch.randint(vocabulary, ids.shape, generator=generator)
        rejected.append((torch.cat([ids[:prompt], other[prompt:]]), prompt))
    return _rows([*chats, *rejected], seq)


KINDS: dict[str, Callable[[int, int, int, torch.Generator], Batch]] = {
    "fixed": _fixed,
    "longest": _longest,
    "padded": _padded,
    "packed": _packed,
    "dpo": _pairs,
    "grpo": _padded,
}


def dpo_loss(model: Any, batch: Batch) -> Tensor:
    """The loss of Direct Preference Optimization (Rafailov et al., 2023, equation 7)."""
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(model, batch).sum(1)
    gained = log_probabilities(model, batch).sum(1) - reference
    chosen, rejected = gained.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def grpo_loss(model: Any, batch: Batch) -> Tensor:
    """The clipped loss of GRPO (Shao et al., 2024, equation 3) without its KL term, as TRL's."""
    with torch.no_grad():
        before = log_probabilities(model, batch)
    now = log_probabilities(model, batch)
    rewards = torch.arange(len(now), dtype=now.dtype, device=now.device)
    advantages = ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4))[:, None]
    if len(now) == 1:
        advantages = torch.ones_like(advantages)
    ratio = (now - before).exp()
    least = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -least.sum() / with_loss(batch)


LOSSES: dict[str, Loss] = {"dpo": dpo_loss, "grpo": grpo_loss}
"""Those of the kinds whose loss is not the model's own."""
