"""moe_qlora/packing/selection.py: to be described."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import (
    ConfigError,
)
from ..layout import ExpertParam, ModelLayout
from . import parametrize
from .settings import CodecSettings


@dataclass
class WeightSelection:
    """One stack and what becomes of it."""

    param: ExpertParam
    status: str
    reason: str = ""


def select_weights(
    model: nn.Module, layout: ModelLayout, config: Any, settings: CodecSettings
) -> list[WeightSelection]:
    _warn_unmatched(model, settings.skip_modules)
    theirs = _target_parameters(config)
    jobs = []
    for param in layout.experts:
        module = model.get_submodule(param.module_name)
        skip = _skipping_pattern(param, settings.skip_modules)
        if parametrize.is_packed(module, param.parameter_name):
            foreign = parametrize.is_foreign(module, param.parameter_name)
            reason = "packed by bitsandbytes' own helper" if foreign else ""
            jobs.append(WeightSelection(param, ALREADY_QUANTIZED, reason))
        elif any(_covers(pattern, param) for pattern in theirs):
            reason = "left to the config's own target_parameters"
            jobs.append(WeightSelection(param, SKIPPED, reason))
        elif skip is not None:
            jobs.append(WeightSelection(param, SKIPPED, f"llm_int8_skip_modules names {skip!r}"))
        else:
            jobs.append(WeightSelection(param, QUANTIZED))
    return jobs


def weights_to_pack(
    model: nn.Module, layout: ModelLayout, config: Any, settings: CodecSettings
) -> list[ExpertParam]:
    """The stacks of a model that `quantize_experts` would pack, the caller's skips left out."""
    jobs = select_weights(model, layout, config, settings)
    return [job.param for job in jobs if job.status == QUANTIZED]


def _names(param: ExpertParam) -> Iterator[str]:
    for name in (param.name, *param.aliases):
        yield name
        yield name.rpartition(".")[0]


def _skipping_pattern(param: ExpertParam, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that takes the stack or its module out, by transformers' own rule."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    for pattern in patterns:
        if not all(should_convert_module(name, [pattern]) for name in _names(param)):
            return pattern
    return None


def _warn_unmatched(model: nn.Module, patterns: tuple[str, ...]) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters()]
    names += [f"{name}.{parameter}" for name, _, parameter in parametrize.iter_packed(model)]
    for pattern in patterns:
        try:
            matched = any(not should_convert_module(name, [pattern]) for name in names)
        except re.error as error:
            raise ConfigError(
                f"llm_int8_skip_modules holds {pattern!r}, which is no valid pattern: {error}."
            ) from error
        if not matched:
            warnings.warn(
                f"llm_int8_skip_modules names {pattern!r}, which matches nothing in the model.",
                UserWarning,
                stacklevel=4,
            )


def _target_parameters(config: Any) -> tuple[str, ...]:
    """Patterns of a config that knows how to have bitsandbytes pack parameters itself."""
    if isinstance(config, Mapping):
        theirs = config.get("target_parameters")
    else:
        theirs = getattr(config, "target_parameters", None)
    return (theirs,) if isinstance(theirs, str) else tuple(theirs or ())


def _covers(pattern: str, param: ExpertParam) -> bool:
    for name in (param.name, *param.aliases):
        if name == pattern or name.endswith("." + pattern):
            return True
        try:
            if re.fullmatch(pattern, name):
                return True
        except re.error:
            continue
    return False


QUANTIZED = "quantized"
ALREADY_QUANTIZED = "already_quantized"
SKIPPED = "skipped"
