"""The rule of `llm_int8_skip_modules`: which names a pattern leaves in 16 bit.

It is the rule of transformers' `should_convert_module` (5.23), which decides for Linear layers.
Here it decides for expert weights, without an import of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..layout import ExpertParam

_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def is_skipped(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any pattern names this module or parameter.

    A pattern names what starts with it, up to a component's end, as a regex ("layer.1" names
    "layer.1.attn", not "layer.11"), and what ends with it, literally ("fc1" names "layer.2.fc1").

    Raises:
        re.error: A pattern is not a valid regex.
    """
    return any(
        re.match(f"(?:{pattern}){_BOUNDARY}", name) or name.endswith(pattern)
        for pattern in patterns
    )


def skipping_pattern(param: ExpertParam, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that names the expert weight or its module; None if none does."""
    names = [path for name in param.names for path in (name, name.rpartition(".")[0])]
    return next((p for p in patterns if any(is_skipped(name, [p]) for name in names)), None)
