"""Folders that their makers quantized, read as the 16-bit folders that they stand for.

open            any folder as a `Checkpoint` of plain tensors; config.json, as that of the
                16-bit folder; `PrequantizedCheckpoint`: rows decoded when read
config          what a quantization_config says: schemes, targets, modules not converted
formats         codes of 8 bits, E2M1 floats, packed integers; which stored tensors make which
                plain ones; codes times scales, in pieces, for all of them
"""

from .config import maker_method
from .open import (
    PrequantizedCheckpoint,
    codes_of_source,
    describe_plain,
    described_method,
    open_plain,
    unread_method,
)

__all__ = [
    "PrequantizedCheckpoint",
    "codes_of_source",
    "describe_plain",
    "described_method",
    "maker_method",
    "open_plain",
    "unread_method",
]
