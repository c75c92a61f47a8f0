"""Plans of any settings of a step, with or without a search."""

from __future__ import annotations

from typing import Any

from moe_qlora.planning.plan import plan_settings
from moe_qlora.planning.report import MemoryPlan

_OTHERS = ("lora_config", "gpus", "engine", "memory", "search")


def plan(model: Any, quantization_config: Any = None, **asked: Any) -> MemoryPlan:
    """Return the plan for fields of `Settings`, and for other arguments of `plan_settings`."""
    others = {name: asked.pop(name) for name in _OTHERS if name in asked}
    for name in asked.keys() & {"ddp", "fsdp"}:
        others["engine"] = f"{name}:{asked.pop(name)}"
    asked = {name: value for name, value in asked.items() if value is not None}
    return plan_settings(model, quantization_config, asked, **others)
