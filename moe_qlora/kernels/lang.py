"""Triton and its language, and how a kernel is launched.

Without Triton, names stand for both: kernels are then defined and never launched, and a plan on
meta still runs what surrounds them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["HAS_TRITON", "aligned", "run_kernel", "tl", "triton"]

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


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch on the current stream of the device of the first argument, a tensor.

    On meta nothing runs, as of torch's operators, nor does an empty grid. `options` are the
    kernel's constants and Triton's compile options.
    """
    device = args[0].device
    if device.type == "meta" or not all(grid):
        return
    # The default until Triton 3.10, with which the kernels were tested.
    options = {"enable_fp_fusion": True, **options}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **options)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that starts at a multiple of 16 bytes, as wide copies need."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
