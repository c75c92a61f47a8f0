"""Names of Gluon, Triton's language of layouts, that differ between Triton 3.6 and 3.9."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# Of a program's threads: 3.6, then 3.7 on.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
# Up to 3.7, then 3.8 on; in 3.9 the old name raises.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Up to 3.8, then 3.9.
_descriptor = gl.shared_memory_descriptor
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
