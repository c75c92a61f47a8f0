"""Linear layers that bitsandbytes packs itself."""

from __future__ import annotations

from typing import Any, cast

import bitsandbytes.nn
from torch import nn

# bitsandbytes has no type annotations to check against.
_bnb: Any = cast(Any, bitsandbytes.nn)


def is_packed_linear(module: nn.Module) -> bool:
    """Return whether this is one of bitsandbytes' Linear layers."""
    return isinstance(module, (_bnb.Linear4bit, _bnb.Linear8bitLt))
