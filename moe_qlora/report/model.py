"""The pieces that need a model's configuration alone: its layout, its bytes, a rehearsed step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..layout import ExpertParam, ModelLayout, name_pattern
from ..lora.config import top_k_of
from ..memory.budget import Settings
from ..memory.rehearsal import Inventory, rehearse
from .pieces import LayoutPiece, MemoryPiece, WeightGroup


def describe(inventory: Inventory) -> LayoutPiece:
    """Return the layout of a model that was counted."""
    layout, config = inventory.layout, inventory.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return LayoutPiece(
        model_type=str(getattr(config, "model_type", "") or ""),
        packed=inventory.packed,
        groups=tuple(_groups(layout)),
        layers=len(layout.modules),
        experts=tuple(sorted({module.num_experts for module in layout.modules})),
        top_k=top_k_of(config) or top_k_of(text),
        routers=_patterns(router.name for router in layout.routers),
        linear_experts=_patterns(item.name for item in layout.linear_experts),
        rejected=len(layout.rejected),
        kinds=inventory.kinds,
    )


def _groups(layout: ModelLayout) -> Iterable[WeightGroup]:
    alike: dict[tuple[Any, ...], list[ExpertParam]] = {}
    for param in layout.experts:
        key = (param.pattern, param.shape, param.role, param.packed or param.dtype_name)
        alike.setdefault(key, []).append(param)
    for (pattern, shape, role, dtype), params in alike.items():
        yield WeightGroup(pattern, len(params), shape, role, dtype, params[0].evidence)


def _patterns(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(name_pattern(name) for name in names).items())


def rehearsed(
    model: Any,
    quantization_config: Any,
    lora_config: Any,
    *,
    batch: int,
    seq: int,
    length: str,
    trust_remote_code: bool,
) -> MemoryPiece:
    """Rehearse a training step with this LoRA; None is LoRA on attention and experts."""
    settings = Settings(batch=batch, seq=seq, targets="attention,experts")
    if lora_config is not None:
        rank = getattr(lora_config, "r", settings.rank)  # other kinds of adapters have none
        settings = replace(settings, rank=rank, targets="lora_config")
    plan, moments = rehearse(
        model,
        quantization_config,
        settings=settings,
        lora_config=lora_config,
        trust_remote_code=trust_remote_code,
    )
    return MemoryPiece(plan, moments, length)
