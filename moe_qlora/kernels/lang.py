"""Triton and its language; without Triton, names that stand for them.

Kernels are then defined and never launched: a plan on meta still runs what surrounds them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HAS_TRITON", "tl", "triton"]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Every attribute is absent as well, and a decorator returns the function itself."""

        CompilationError = RuntimeError

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << (n - 1).bit_length()

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[0] if args else self

    triton = tl = _Absent()
