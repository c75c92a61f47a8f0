"""What a step takes of each training objective that loaders name: sequences, and logits.

A row of preferences is two sequences. Preference losses and policy gradients read the probability
of each token: loaders' trainers keep the logits of all tokens for it, where the model's own loss
keeps a chunk of them at a time.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..memory.measure import Loss

_PAIRS = frozenset({"dpo", "ipo", "orpo", "simpo", "cpo", "rm"})
_OF_LABELS = frozenset({"sft", "pt", "rm"})
"""Those whose trainers call the model's own loss, or need one number for a sequence."""
_WITH_REFERENCE = frozenset({"dpo", "ipo", "kto"})


def sequences_of(objective: str) -> int:
    """Return how many sequences a row is."""
    return 2 if objective in _PAIRS else 1


def loss_of(objective: str) -> Loss | None:
    """Return what takes the memory of an objective's loss, as `prepare_training(loss=)` wants it.

    None is the model's own loss. An objective that is not known reads logits without a reference.
    """
    if objective in _OF_LABELS:
        return None
    return partial(_of_probabilities, referred=objective in _WITH_REFERENCE)


def _of_probabilities(model: Any, batch: dict[str, Any], *, referred: bool) -> Tensor:
    """Return the tokens' mean log-probability, beside that of the model without adapters.

    The reference runs while the policy's activations are alive, as in TRL 1.9 and LLaMA-Factory.
    """
    mean = log_probabilities(model, batch).mean()
    if not referred:
        return mean
    with torch.no_grad(), ExitStack() as stack:
        if hasattr(model, "disable_adapter"):
            stack.enter_context(model.disable_adapter())
        reference = log_probabilities(model, batch).mean()
    return mean - reference


def log_probabilities(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the log-probability of each token with a label, 0 of others: `(B, S - 1)`, float32.

    Row by row, as TRL's `selective_log_softmax` does for 16 bit. Its logits are float32 under
    autocast.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    rows = zip(logits, labels, strict=True)
    return torch.stack([-F.cross_entropy(a.float(), b, reduction="none") for a, b in rows])
