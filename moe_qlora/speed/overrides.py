"""Gradient checkpointing of transformers, switched off on one model while its memory is fitted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_log = logging.getLogger(__name__)

_ENABLE = "gradient_checkpointing_enable"
_FLAG = "gradient_checkpointing"
_BY = "_moe_qlora_overrides"
"""Attribute of the function that stands in for `_ENABLE`: the `Overrides` that put it there."""


def release_copy(model: nn.Module) -> None:
    """Let gradient checkpointing be switched on for a copy of a model that has overrides."""
    for host in model.modules():
        if isinstance(getattr(vars(host).get(_ENABLE), _BY, None), Overrides):
            del vars(host)[_ENABLE]


class Overrides:
    """Layers without their own checkpointing, on a model that nothing switches it on for."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._flags = [(layer, vars(layer)[_FLAG]) for layer in layers if _FLAG in vars(layer)]
        for layer, _ in self._flags:
            setattr(layer, _FLAG, False)
        self._hosts = [m for m in model.modules() if callable(getattr(type(m), _ENABLE, None))]
        self._before = [vars(host).get(_ENABLE) for host in self._hosts]
        self._said = False
        for host in self._hosts:
            vars(host)[_ENABLE] = self._does_nothing(host)

    def _does_nothing(self, host: nn.Module) -> Callable[..., None]:
        def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> None:
            if not self._said:
                self._said = True
                _log.warning(
                    "fit_memory has chosen what each layer of %s keeps and computes again: "
                    "gradient_checkpointing_enable() changes nothing.",
                    type(host).__name__,
                )

        setattr(gradient_checkpointing_enable, _BY, self)
        return gradient_checkpointing_enable

    def remove(self) -> None:
        """Give the layers and the model back what they had."""
        for layer, flag in self._flags:
            setattr(layer, _FLAG, flag)
        for host, before in zip(self._hosts, self._before, strict=True):
            vars(host).pop(_ENABLE, None)
            if before is not None:
                vars(host)[_ENABLE] = before
        self._flags, self._hosts, self._before = [], [], []
