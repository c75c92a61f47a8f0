"""Names of Gluon, Triton's language of layouts, that differ between Triton 3.6 and 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

_of_copies, _of_tiles = vars(async_copy), vars(gl.shared_memory_descriptor)
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # 3.6; later
# In 3.9 the old name is there, and raises.
async_load = _of_copies.get("async_load") or _of_copies["async_copy_global_to_shared"]
reinterpret = _of_tiles.get("reinterpret") or _of_tiles["_reinterpret"]  # 3.9; before
