"""The largest tensor that operators allocate."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`largest`: bytes of the largest storage that an operator made, for this dtype or any."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.largest = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {t.untyped_storage().data_ptr(): t for t in tree_leaves(each) if torch.is_tensor(t)}
            for each in ((args, kwargs), result)
        )
        for tensor in (made[pointer] for pointer in made.keys() - given.keys()):
            if self.dtype in (None, tensor.dtype):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result
