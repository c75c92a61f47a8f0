"""Triton and its language, and how a kernel is launched.

Without Triton, names stand for both: kernels are then defined and never launched, and a plan on
meta still runs the code around them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["HAS_TRITON", "aligned", "launcher", "tl", "triton"]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Every attribute is absent as well, and a decorator returns the function itself."""

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << (n - 1).bit_length()

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[0] if args else self

    triton = tl = _Absent()


def launcher(kernel: Any, grid: tuple[int, ...], like: Tensor) -> Callable[..., Any]:
    """Return the launch of a kernel on the current stream of a tensor's device.

    It is called with the kernel's arguments, its constants and Triton's compile options. On meta,
    and for an empty grid, it does nothing.
    """
    device = like.device
    if device.type == "meta" or not all(grid):
        return lambda *args, **options: None
    # The default until Triton 3.10, with which the kernels were tested.
    launch = partial(kernel[grid], enable_fp_fusion=True)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return partial(_on_device, device, launch)
    return launch


def _on_device(device: torch.device, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with torch.cuda.device(device):
        launch(*args, **kwargs)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that starts at a multiple of 16 bytes, as wide copies need."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
