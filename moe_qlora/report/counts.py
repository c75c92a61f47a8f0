"""How many assignments each expert gets: `with ExpertCounts(model) as counts: ...`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..detection.detect import detect
from ..errors import DetectionError
from ..kernels.workspace import in_backward
from ..layout import unwrapped_name


class ExpertCounts:
    """The counts of one model, until the end of the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        unwrap = getattr(model, "get_base_model", None)
        base: Any = unwrap() if callable(unwrap) and hasattr(model, "base_model") else model
        routed = [module for module in detect(base).modules if module.router is not None]
        if not routed:
            raise DetectionError(f"{type(base).__name__} has no fused experts behind a router.")
        self._counts: dict[str, Tensor] = {}
        self._hooks = []
        for entry in routed:
            module, name = base.get_submodule(entry.name), unwrapped_name(entry.name)
            zeros = torch.zeros(entry.num_experts + 1, dtype=torch.int64)
            self._counts[name] = zeros.to(next(module.parameters()).device)
            hook = self._hook_of(name)
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook_of(self, name: str) -> Any:
        def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for value in () if in_backward() else (*args, *kwargs.values()):
                # the ids: the `(T, k)` integers among an experts module's arguments
                if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
                    counts = self._counts[name] = self._counts[name].to(value.device)
                    ids, last = value.reshape(-1).long(), len(counts) - 1
                    ids = torch.where((ids < 0) | (ids > last), last, ids)
                    counts.scatter_add_(0, ids, torch.ones_like(ids))
                    return

        return add

    def read(self) -> dict[str, Tensor]:
        """Return the counts so far, `(E,)` by the names that modules have without adapters."""
        return {name: counts[:-1].cpu() for name, counts in self._counts.items()}

    def __enter__(self) -> ExpertCounts:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
