"""The switch: while it is on, every `from_pretrained` with a bitsandbytes config packs experts.

The one thing that it changes is which classes transformers' quantizer mapping names for
bitsandbytes configs; turning it off puts back exactly what was there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_METHODS = ("bitsandbytes_4bit", "bitsandbytes_8bit")

_lock = threading.RLock()
_replaced: dict[str, tuple[type, type]] = {}  # method -> (theirs, ours)
_blocks: list[tuple[str, ...]] = []  # what each open block leaves unpacked
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
def enabled(*, skip_modules: Sequence[str] = ()) -> Iterator[None]:
    """Pack experts while loading, within the block.

    Blocks may nest and overlap, in several threads too: the switch goes off when the last one ends,
    also by an exception. It is the process's: other threads' loads are packed meanwhile as well.

    Args:
        skip_modules: Patterns, as in `llm_int8_skip_modules`, of what loads within the block leave
            in 16 bit, on top of their own config's. For loaders that make the `BitsAndBytesConfig`
            where the caller does not reach it.
    """
    skips = tuple(skip_modules)
    with _lock:
        _install()
        _blocks.append(skips)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(skips)
            _restore()


def extra_skip_modules() -> tuple[str, ...]:
    """What the open blocks leave unpacked on top of a load's own config, each pattern once."""
    with _lock:
        return tuple(dict.fromkeys(pattern for skips in _blocks for pattern in skips))


def is_enabled() -> bool:
    """Whether the switch is on."""
    with _lock:
        return bool(_replaced)


def _install() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    from .quantizer import packing_quantizer

    if _replaced:
        return
    ours = {
        method: packing_quantizer(AUTO_QUANTIZER_MAPPING[method], extra_skip_modules)
        for method in _METHODS
    }
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
