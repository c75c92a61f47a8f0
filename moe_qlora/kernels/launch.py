"""Launches kernels with little of the host's time, on the device where their tensors lie.

A layer's step launches some 20 kernels of up to 30 arguments, and up to a few thousand tokens it is
bound by the host. At each launch Triton looks up the compiled kernel by the types of all arguments
and constants, and parses them once more in C. A `Launcher` caches the compiled kernel, writes the
arguments into a buffer and calls the driver.
"""

from __future__ import annotations

import ctypes
import re
import struct
from _thread import get_ident
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .lang import triton

Geometry = tuple[tuple[int, ...], dict[str, Any]]
"""A launch's grid, and the kernel's constants and compile options by name."""

_MOST_CACHED = 256
"""Launches that a launcher caches; the oldest is dropped first."""


class Launcher:
    """A kernel and the function that returns its grid and constants; made by `launcher`.

    A launch is cached by the function's arguments, the tensors' dtypes and their device. So grid
    and constants must depend on those alone, and so must all integers among the kernel's arguments
    that Triton specializes on (1, or multiples of 16).
    """

    __slots__ = ("cache", "geometry", "kernel", "tensors")

    def __init__(self, kernel: Any, geometry: Callable[..., Geometry]) -> None:
        self.kernel, self.geometry = kernel, geometry
        self.cache: dict[tuple[Any, ...], _Compiled] = {}
        self.tensors = 0  # Number of tensors among the kernel's arguments, known after a launch

    def __call__(self, sizes: tuple[Any, ...], *args: Any) -> None:
        """Launch on the current stream of the tensors' device; `sizes` are `geometry`'s arguments.

        `args` are tensors, and after them numbers. For a cached launch all tensors must start
        at multiples of 16 bytes (`aligned`).
        """
        index = args[0].get_device()  # -1 for the CPU
        tensors = args[: self.tensors]
        compiled = self.cache.get((sizes, index, *[t.dtype for t in tensors]))
        if compiled is None:
            self._first(sizes, index, args)
            return
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(sizes, *args)
            return
        values: list[Any] = [t.data_ptr() for t in tensors]
        values += args[self.tensors :]
        if compiled.by_triton is not None:
            compiled.by_triton(values)
            return
        if len(compiled.used) != len(values):
            values = [values[i] for i in compiled.used]
        buffer, pointers, pack = compiled.buffers.get(get_ident()) or compiled.buffer()
        pack(buffer, 0, *values, *compiled.more)
        launch = (*compiled.launch, stream_of(index), pointers, None)
        error = compiled.call(*launch)
        if error == _NO_CONTEXT:
            _enter(index)
            error = compiled.call(*launch)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {error}).")

    def _first(self, sizes: tuple[Any, ...], index: int, args: tuple[Any, ...]) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if len({t.device for t in tensors}) > 1:
            devices = ", ".join(sorted({str(t.device) for t in tensors}))
            raise ValueError(f"the tensors of one kernel lie on several devices: {devices}.")
        if tensors[0].is_meta:
            return  # as torch's own operators, which compute nothing there
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._first(sizes, index, args)
            return
        grid, constants = self.geometry(*sizes)
        grid = (*grid, 1, 1)[:3]
        if not all(grid):
            return
        # The default until Triton 3.10, with which the kernels were tested.
        options = {"enable_fp_fusion": True} | constants
        if index < 0 or any(t.data_ptr() % 16 for t in tensors):
            self.kernel[grid](*args, **options)
            return
        compiled = self.kernel.warmup(*args, grid=grid, **options)
        if compiled is None:  # interpreted
            self.kernel[grid](*args, **options)
            return
        names = self.kernel.arg_names[len(args) :]
        if len(self.cache) >= _MOST_CACHED:
            self.cache.pop(next(iter(self.cache)), None)
        named = tuple(constants[name] for name in names)
        self.tensors = len(tensors)
        key = (sizes, index, *[t.dtype for t in tensors])
        self.cache[key] = _Compiled(compiled, grid, index, named)
        self(sizes, *args)


def launcher(kernel: Any) -> Callable[[Callable[..., Geometry]], Launcher]:
    """Make a function that returns a `Geometry` the `Launcher` of a kernel, as a decorator."""
    return lambda geometry: Launcher(kernel, geometry)


def stream_of(index: int) -> int:
    """Return the current stream of a CUDA device, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that starts at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}


class _Compiled:
    """A compiled kernel: launched by `cuLaunchKernel`, its arguments in a buffer for each thread.

    Where Triton or the driver is not as this class knows it, `by_triton` launches instead.
    """

    __slots__ = ("buffers", "by_triton", "call", "formats", "launch", "more", "used")

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], index: int, constants: tuple[Any, ...]
    ) -> None:
        self.by_triton: Callable[[list[Any]], None] | None = None
        self.buffers: dict[int, tuple[Any, Any, Any]] = {}
        try:
            parameters = self.parameters(compiled)
            if parameters is not None:
                self.used, self.formats = parameters
                self.more = [0] * (len(self.formats) - len(self.used))
                threads, shared = compiled.metadata.num_warps * 32, compiled.metadata.shared
                # Not by Triton, which compiles a launcher in C first: 0.3 s a kernel.
                load = triton.runtime.driver.active.utils.load_binary
                _, function, *_ = load(compiled.name, compiled.kernel, shared, index)
                self.call = _cuda().cuLaunchKernel
                self.launch = (function, *grid, threads, 1, 1, shared)
                return
        except (AttributeError, KeyError, OSError, RuntimeError):  # an unknown Triton or driver
            pass

        def by_triton(values: list[Any]) -> None:
            # Given tensors, Triton's launcher would ask the driver where each of them lies.
            with torch.cuda.device(index):
                compiled[grid](*values, *constants, stream=stream_of(index))

        self.by_triton = by_triton

    @staticmethod
    def parameters(compiled: Any) -> tuple[list[int], list[str]] | None:
        """Return which arguments are parameters, and all parameters' formats as of `struct`.

        Pointers to scratch memory would follow; the PTX must declare none.
        """
        metadata = compiled.metadata
        plain = (
            metadata.num_ctas == 1
            and not metadata.launch_cooperative_grid
            and not metadata.launch_pdl
            and metadata.global_scratch_size == 0
            and metadata.profile_scratch_size == 0
        )
        kinds = list(compiled.src.signature.values())
        used = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        formats = ["Q" if kinds[i].startswith("*") else _FORMATS[kinds[i]] for i in used]
        entry = re.search(r"\.entry[^(]*\(([^)]*)\)", compiled.asm["ptx"])
        declared = re.findall(r"\.param\s+\.[a-z]*(\d*)", entry.group(1) if entry else "")
        more = len(declared) - len(formats)
        formats += ["Q"] * more
        alike = declared == [str(8 * struct.calcsize(f)) for f in formats]
        return (used, formats) if plain and alike else None

    def buffer(self) -> tuple[Any, Any, Any]:
        layout = struct.Struct("@" + "".join(self.formats))
        room = ctypes.create_string_buffer(layout.size)
        ends = [
            struct.calcsize("@" + "".join(self.formats[: i + 1])) for i in range(len(self.formats))
        ]
        start = ctypes.addressof(room)
        each = [start + end - struct.calcsize(f) for end, f in zip(ends, self.formats, strict=True)]
        pointers = (ctypes.c_void_p * len(each))(*each)
        self.buffers[get_ident()] = room, pointers, layout.pack_into
        return self.buffers[get_ident()]


_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: a thread, autograd's say, that has not called the driver before.

To ask before each launch costs more than one refused call, which compute-sanitizer reports.
"""


def _enter(index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls = (
        _cuda().cuDeviceGet(ctypes.byref(device), index)
        or _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or _cuda().cuCtxSetCurrent(context)
    )
    if calls:
        raise RuntimeError(f"the CUDA driver gave no context of device {index} (error {calls}).")


@cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
    ]  # fmt: skip
    return library
