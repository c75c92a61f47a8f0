"""Padded and packed batches: with most kinds of attention their steps take more memory.

Attention then has a mask of all pairs of tokens, and kernels that read it. `fit_memory` measures
such a step with `padded=True`. Without, a warning says so when such a batch comes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_BATCHES_SEEN = 3


def padded(ids: Tensor) -> dict[str, Any]:
    """Return the arguments that make a batch of token ids `(B, S)` a padded one."""
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return {"attention_mask": mask}


class MaskedBatchWarning:
    """Warns once if one of a model's first batches in training is padded or packed."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = 0
        self.hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def remove(self) -> None:
        """Look at no further batch."""
        self.hook.remove()

    def _look(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        self.seen += 1
        masked = _is_masked(kwargs)
        if masked:
            _log.warning(
                "fit_memory: a batch is padded or packed, and a step of whole sequences was "
                "measured: with most kinds of attention it takes more memory. Call "
                "fit_memory(..., padded=True), which measures a padded one."
            )
        if masked or self.seen >= _BATCHES_SEEN:
            self.remove()


def _is_masked(kwargs: Mapping[str, Any]) -> bool:
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor):
        return not mask.all()  # transformers asks the same of each mask
    if mask is not None or not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions[:, 1:] <= positions[:, :-1]).any())
