"""The text that the demo trains on, which every Python has: its library's sources, its manual."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def library_sources(limit: int) -> str:
    """Sources of the standard library's own modules, at most `limit` characters."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")])
    skipped = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    parts: list[str] = []
    total = 0
    for file in files:
        if file.parent.name in skipped or total >= limit:
            continue
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        total += len(parts[-1])
    return "".join(parts)[:limit]


def manual() -> str:
    """The reference manual that `help()` shows."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def train_tokenizer(text: str) -> Any:
    """Return a tokenizer of 1,024 pieces of words, learned from the ends of `text`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:300_000], text[-300_000:]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def encode(tokenizer: Any, text: str) -> Tensor:
    """All tokens of `text`, (N,) int64."""
    pieces = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    ids = [token for piece in tokenizer(pieces)["input_ids"] for token in piece]
    return torch.tensor(ids)


def batches(tokens: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless random (batch, length) slices of `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts])
