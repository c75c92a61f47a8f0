"""Which expert weights of a model are packed, and why the others are not.

A weight that is packed already stays. Then `llm_int8_skip_modules` decides, as in transformers'
`should_convert_module`.
"""

import re
import warnings
from collections.abc import Iterable

from torch import nn

from ..errors import ConfigError
from ..layout import ExpertParam, ModelLayout
from .settings import CodecSettings

QUANTIZED = "quantized"
ALREADY_QUANTIZED = "already_quantized"
SKIPPED = "skipped"

_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def select_weights(
    model: nn.Module, layout: ModelLayout, settings: CodecSettings
) -> list[tuple[ExpertParam, str, str]]:
    """Return each expert weight of a model, which may be on meta, its status, and why it is that.

    A skip pattern that matches nothing is a warning.
    """
    # Imports bitsandbytes, which prints to stderr; the matching rule alone does not need it.
    from . import parametrize

    names = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    names += [f"{name}.{parameter}" for name, _, parameter in parametrize.iter_packed(model)]
    for pattern in settings.skip_modules:
        if not any(is_skipped(name, pattern) for name in names):
            warnings.warn(
                f"llm_int8_skip_modules names {pattern!r}, which matches nothing in the model.",
                UserWarning,
                stacklevel=3,
            )

    def select(param: ExpertParam) -> tuple[str, str]:
        module = model.get_submodule(param.module_name)
        if parametrize.is_packed(module, param.parameter_name):
            return ALREADY_QUANTIZED, ""
        if param.packed:
            raise ConfigError(
                f"{param.name} is packed as {param.packed} by other code than this package, which "
                "does not compute with it: load the model with this weight in 16 bit."
            )
        if (skipping := skipping_pattern(param, settings.skip_modules)) is not None:
            return SKIPPED, f"llm_int8_skip_modules names {skipping!r}"
        return QUANTIZED, ""

    return [(param, *select(param)) for param in layout.experts]


def weights_to_pack(
    model: nn.Module, layout: ModelLayout, settings: CodecSettings
) -> list[ExpertParam]:
    """Return the expert weights that `quantize_experts` would pack."""
    selections = select_weights(model, layout, settings)
    return [param for param, status, _ in selections if status == QUANTIZED]


def is_skipped(name: str, pattern: str) -> bool:
    """Return whether a pattern, which must be a valid regex, names this module or parameter."""
    # It matches names that start with it as a regex, up to a component's end ("layer.1"
    # matches "layer.1.attn", not "layer.11"), and names that end with it literally ("fc1" matches
    # "layer.2.fc1").
    return bool(re.match(f"(?:{pattern}){_BOUNDARY}", name)) or name.endswith(pattern)


def skipping_pattern(param: ExpertParam, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that names the expert weight or its module; None if none does."""
    names = [path for name in param.names for path in (name, name.rpartition(".")[0])]
    return next((p for p in patterns if any(is_skipped(name, p) for name in names)), None)
