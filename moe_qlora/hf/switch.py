"""The switch: while it is on, every `from_pretrained` with a bitsandbytes config packs experts.

The one thing that it changes is which classes transformers' quantizer mapping names for
bitsandbytes configs; turning it off puts back exactly what was there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")

_lock = threading.RLock()
_replaced: dict[str, tuple[type, type]] = {}  # method -> (theirs, ours)
_blocks = 0
_always = False


def enable() -> None:
    """Pack experts in every `from_pretrained(..., quantization_config=BitsAndBytesConfig(...))`.

    Holds for the whole process, whoever calls `from_pretrained`, until `disable`. Calling it twice
    is the same as once. Models that were loaded meanwhile go on working after `disable`.
    """
    global _always
    with _lock:
        _always = True
        _install()


def disable() -> None:
    """Undo `enable`. Blocks of `enabled` that are still open keep the switch on until they end."""
    global _always
    with _lock:
        _always = False
        _restore()


@contextmanager
def enabled() -> Iterator[None]:
    """Pack experts while loading, within the block.

    Blocks may nest and overlap, in several threads too: the switch goes off when the last one ends,
    also by an exception. It is the process's: other threads' loads are packed meanwhile as well.
    """
    global _blocks
    with _lock:
        _install()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            _restore()


def is_enabled() -> bool:
    """Whether the switch is on."""
    with _lock:
        return bool(_replaced)


def _install() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    from .quantizer import packing_quantizer

    if _replaced:
        return
    ours = {method: packing_quantizer(AUTO_QUANTIZER_MAPPING[method]) for method in _METHODS}
    for method, cls in ours.items():
        _replaced[method] = (AUTO_QUANTIZER_MAPPING[method], cls)
        AUTO_QUANTIZER_MAPPING[method] = cls


def _restore() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if _always or _blocks:
        return
    for method, (theirs, ours) in _replaced.items():
        # Somebody who has put a class of their own there since then keeps it.
        if AUTO_QUANTIZER_MAPPING.get(method) is ours:
            AUTO_QUANTIZER_MAPPING[method] = theirs
    _replaced.clear()
