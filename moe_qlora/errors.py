"""The exceptions that this package raises on purpose.

`MoeQloraError` catches all of them; each is a ValueError or a RuntimeError, too.

Every message is one sentence for a person: what failed, the full name of the parameter or setting,
what was seen, what was expected and what to do.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# C0 and C1 controls, DEL, line separators, invisible and bidirectional marks, lone surrogates.
_HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f"
    "\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)


def visible(text: str, keep: str = "") -> str:
    """Escape control and invisible characters as in JSON (u001b), except those in `keep`."""
    # Names of tensors and files, and values of configurations, are not to be trusted.
    return _HIDDEN.sub(lambda m: m[0] if m[0] in keep else _escaped(ord(m[0])), text)


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(kind: str, message: object) -> str:
    """Return a message for stderr, always on one line."""
    words = visible(str(message), keep="\n").split()
    return f"{kind}: {' '.join(words)}\n"


def check_numbers(**numbers: Any) -> None:
    """Raise a ConfigError unless each is a whole number of 1 or more."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give a whole number of 1 or more.")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error without its full stop, for a quote."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean a or b?)` with the nearest known words; "" if none is near."""
    by_lower = {each.lower(): each for each in known}
    near = [by_lower[one] for one in get_close_matches(word.lower(), by_lower, n=3, cutoff=0.7)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


class MoeQloraError(Exception):
    """Base of every exception that this package raises on purpose."""

    def __str__(self) -> str:
        return visible(super().__str__(), keep="\n")


class ConfigError(MoeQloraError, ValueError):
    """The caller's quantization or LoRA settings cannot be followed."""


class DetectionError(MoeQloraError, ValueError):
    """The model holds no expert tensors, or none that could be packed."""


class QuantizationError(MoeQloraError, RuntimeError):
    """A weight cannot be packed or unpacked."""


class UnsupportedWeightError(QuantizationError):
    """The weight's storage cannot be packed: meta, sharded, integer or packed by others."""


class NonFiniteWeightError(QuantizationError):
    """The weight holds NaN or inf, or values of 1e30 and more."""


class AdapterError(MoeQloraError, RuntimeError):
    """LoRA on packed experts cannot be created, connected or merged."""


class CheckpointError(MoeQloraError, ValueError):
    """A checkpoint, configuration or registry file is missing, damaged or of a foreign format."""
