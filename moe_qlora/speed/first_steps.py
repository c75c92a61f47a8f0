"""The planned peak of `fit_memory` against that of the first steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..layout import human_bytes

_log = logging.getLogger(__name__)

_TOLERANCE = 1.03  # of the peak of the first steps over the planned one
_STEPS_CHECKED = 3
_EXPANDABLE = " PYTORCH_ALLOC_CONF=expandable_segments:True in its environment leaves fewer gaps."


def expandable() -> bool:
    """Whether torch's allocator has expandable segments, which leave fewer gaps."""
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


class FirstSteps:
    """Compares the planned peak with that of the first steps, before each forward."""

    def __init__(self, fit: Any) -> None:
        self.fit, self.calls = fit, 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        fit = self.fit
        if not (model.training and torch.is_grad_enabled()):
            return
        if not self.calls:
            torch.cuda.reset_peak_memory_stats(fit._device)
            self._give_back_once()
        self.calls += 1
        if self.calls <= _STEPS_CHECKED:
            return
        if fit._hook is not None:
            fit._hook.remove()
            fit._hook = None
        peak = torch.cuda.max_memory_allocated(fit._device)
        reserved = torch.cuda.max_memory_reserved(fit._device)
        # What graphs and libraries take of their own is planned, but is no tensor of a step.
        planned = max(_TOLERANCE * fit.peak, fit._needs)
        if peak <= planned and reserved <= fit.memory:
            return
        alone = not (dist.is_available() and dist.is_initialized())
        less = alone and max(peak, reserved) > fit.memory
        _log.warning(
            "fit_memory: the first steps took %s of memory (%s with what torch's allocator holds "
            "in reserve), and %s were planned (an optimizer with larger states, other tensors on "
            "the device, gaps between tensors)%s.%s",
            human_bytes(peak),
            human_bytes(reserved),
            human_bytes(fit.peak),
            "; layers keep less on the device from now on" if less else "",
            _EXPANDABLE if peak <= fit.memory < reserved and not expandable() else "",
        )
        if less:
            fit._keep_less(max(peak - fit.peak, reserved - fit._needs))
            self._give_back_once()  # The next step runs without graphs again

    def _give_back_once(self) -> None:
        fit = self.fit
        if fit._given_back is not None:
            fit._given_back.remove()
        if fit._is_recorded:
            fit._given_back = _give_back_once(fit._modules[fit._choices.layers[0]])


def _give_back_once(layer: nn.Module) -> Any:
    """Give back the memory of the first backward, once a layer's gradients are there.

    That step ran without graphs. An optimizer makes its states next, and in gaps between them
    would be memory that graphs cannot use. Returns the hook, None where nothing is trained.
    """
    trained = next((p for p in layer.parameters() if p.requires_grad), None)
    if trained is None:
        return None

    def give_back(_: Any) -> None:
        handle.remove()
        torch.cuda.empty_cache()

    handle = trained.register_post_accumulate_grad_hook(give_back)
    return handle
