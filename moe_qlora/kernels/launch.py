"""Launches kernels with little of the host's time, on the device where their tensors lie.

A layer's step launches some 20 kernels of up to 30 arguments, and up to a few thousand tokens the
host is what it waits for. Triton finds a compiled kernel anew at each launch, by the types of all
arguments and all constants, and parses all of them once more in C. A `Launcher` remembers it for
calls alike: from the second one on it writes the arguments into a buffer and calls the driver.
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
import triton
from torch import Tensor

Geometry = tuple[tuple[int, ...], dict[str, Any]]
"""A launch's grid, and the kernel's constants and compile options by name."""

_MOST_KEPT = 256
"""Launches that a launcher remembers; the oldest goes first."""


class Launcher:
    """A kernel and a function that says how it is launched; made by `launcher`.

    The function's arguments, the tensors' dtypes and their device are the key under which a launch
    is remembered. So grid and constants depend on those arguments alone, and so do all whole
    numbers among the kernel's own arguments that it specializes on (1, or multiples of 16).
    """

    __slots__ = ("geometry", "kept", "kernel", "tensors")

    def __init__(self, kernel: Any, geometry: Callable[..., Geometry]) -> None:
        """Take a Triton or Gluon function, and what gives its grid and constants."""
        self.kernel, self.geometry = kernel, geometry
        self.kept: dict[tuple[Any, ...], _Compiled] = {}
        self.tensors = 0  # How many of the kernel's arguments are, known after a first launch

    def __call__(self, sizes: tuple[Any, ...], *args: Any) -> None:
        """Launch on the current stream of the tensors' device; `sizes` are `geometry`'s arguments.

        `args` are tensors, and after them numbers. Where a launch is remembered, all tensors start
        at multiples of 16 bytes (`aligned`).
        """
        index = args[0].get_device()  # -1 for the CPU
        tensors = args[: self.tensors]
        step = self.kept.get((sizes, index, *[t.dtype for t in tensors]))
        if step is None:
            self._first(sizes, index, args)
            return
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(sizes, *args)
            return
        values: list[Any] = [t.data_ptr() for t in tensors]
        values += args[self.tensors :]
        if step.by_triton is not None:
            step.by_triton(values)
            return
        if len(step.used) != len(values):
            values = [values[i] for i in step.used]
        buffer, pointers, pack = step.buffers.get(get_ident()) or step.buffer()
        pack(buffer, 0, *values, *step.more)
        launch = (*step.launch, stream_of(index), pointers, None)
        error = step.call(*launch)
        if error == _NO_CONTEXT:
            _enter(index)
            error = step.call(*launch)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {error}).")

    def _first(self, sizes: tuple[Any, ...], index: int, args: tuple[Any, ...]) -> None:
        """Launch by Triton, and remember what a device has compiled."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        if len({t.device for t in tensors}) > 1:
            devices = ", ".join(sorted({str(t.device) for t in tensors}))
            raise ValueError(f"the tensors of one kernel lie on several devices: {devices}.")
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._first(sizes, index, args)
            return
        grid, constants = self.geometry(*sizes)
        grid = (*grid, 1, 1)[:3]
        if not all(grid):
            return
        compiled = self.kernel[grid](*args, **constants)
        at_16 = all(t.data_ptr() % 16 == 0 for t in tensors)
        if index >= 0 and at_16 and isinstance(compiled, triton.compiler.CompiledKernel):
            names = self.kernel.arg_names[len(args) :]
            if len(self.kept) >= _MOST_KEPT:
                self.kept.pop(next(iter(self.kept)), None)
            named = tuple(constants[name] for name in names)
            self.tensors = len(tensors)
            key = (sizes, index, *[t.dtype for t in tensors])
            self.kept[key] = _Compiled(compiled, grid, index, named)


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

    Where anything is not as this class reads it, `by_triton` launches it instead.
    """

    __slots__ = ("buffers", "by_triton", "call", "compiled", "formats", "launch", "more", "used")

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], index: int, constants: tuple[Any, ...]
    ) -> None:
        self.compiled = compiled  # the function lives as long
        self.by_triton: Callable[[list[Any]], None] | None = None
        self.buffers: dict[int, tuple[Any, Any, Any]] = {}
        try:
            parameters = self.parameters(compiled)
            if parameters is not None and compiled.function is not None:
                self.used, self.formats = parameters
                self.more = [0] * (len(self.formats) - len(self.used))
                threads, shared = compiled.metadata.num_warps * 32, compiled.metadata.shared
                self.call = _cuda().cuLaunchKernel
                self.launch = (compiled.function, *grid, threads, 1, 1, shared)
                return
        except (AttributeError, KeyError, OSError):  # not the Triton, or the driver, that it knows
            pass

        def by_triton(values: list[Any]) -> None:
            # Of a tensor Triton's launcher would ask where it lies, and of the driver whether.
            with torch.cuda.device(index):
                compiled[grid](*values, *constants, stream=stream_of(index))

        self.by_triton = by_triton

    @staticmethod
    def parameters(compiled: Any) -> tuple[list[int], list[str]] | None:
        """Return which arguments are parameters, and all parameters' formats as of `struct`.

        After them come pointers to scratch memory, which none here has: the PTX has to say so.
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
        """Return this thread's room for the arguments, their addresses, and what writes them."""
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
    """Make the device's primary context, which torch computes in, this thread's."""
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
    """Load the driver's library."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
    ]  # fmt: skip
    return library
