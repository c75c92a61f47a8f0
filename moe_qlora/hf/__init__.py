"""Packing while transformers loads: the only place that touches its loader.

switch.py      which quantizer class serves bitsandbytes configs, and back
quantizer.py   that class: what transformers asks a quantizer while it loads a model
plan.py        what one load packs, and with what
converters.py  from tensors on disk to packed stacks, one expert at a time
"""

from .switch import disable, enable, enabled, is_enabled

__all__ = [
    "disable",
    "enable",
    "enabled",
    "is_enabled",
]
