"""Launches kernels with little of the host's time, on the device where their tensors lie.

A layer's step launches some 20 kernels of up to 30 arguments, and up to a few thousand tokens the
host is what it waits for. Triton finds a compiled kernel anew at each launch, by the types of all
arguments and all constants, and parses all of them once more in C. A `Launch` is made once for
calls alike; from its second call on it writes the arguments into a buffer and calls the driver.
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


class Launch:
    """A kernel with its grid and constants.

    Calls must be alike: tensors of the same dtypes on the same device, whole numbers of the same
    size, equal to 1 or multiples of 16 in the same places, unless the kernel does not specialize on
    them. Who makes a `Launch` keeps it under a key that tells these apart.
    """

    __slots__ = ("constants", "grid", "kernel", "run")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:
        """Remember a Triton or Gluon function, its grid, and constants after its arguments."""
        self.kernel, self.constants = kernel, constants
        self.grid = (*grid, 1, 1)[:3]
        self.run: _Driver | Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of the tensors' device; the first argument is a tensor.

        From the second call on, all tensors start at multiples of 16 bytes (`aligned`).
        """
        if self.run is not None:
            self.run(self.grid, args)
            return
        tensors = [a for a in args if isinstance(a, Tensor)]
        index = tensors[0].get_device()  # -1 for the CPU
        if len({t.device for t in tensors}) > 1:
            devices = ", ".join(sorted({str(t.device) for t in tensors}))
            raise ValueError(f"the tensors of one kernel lie on several devices: {devices}.")
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(*args)
            return
        if not all(self.grid):
            return
        compiled = self.kernel[self.grid](*args, **self.constants)
        at_16 = all(t.data_ptr() % 16 == 0 for t in tensors)
        if index >= 0 and at_16 and isinstance(compiled, triton.compiler.CompiledKernel):
            names = self.kernel.arg_names[len(args) :]
            constants = tuple(self.constants[name] for name in names)
            self.run = _Driver.of(compiled, index) or _by_triton(compiled, index, constants)


def stream_of(index: int) -> int:
    """Return the current stream of a CUDA device, as the driver knows it."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that starts at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _by_triton(compiled: Any, index: int, constants: tuple[Any, ...]) -> Callable[..., None]:
    """Return what launches a compiled kernel by Triton."""

    def run(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        # Of a tensor Triton's launcher would ask where it lies, and of the driver whether it does.
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        with torch.cuda.device(index):
            compiled[grid](*values, *constants, stream=stream_of(index))

    return run


_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}


class _Driver:
    """A compiled kernel, launched by `cuLaunchKernel` with arguments in a buffer of its own."""

    __slots__ = ("buffers", "call", "compiled", "formats", "function", "index", "more", "shared",
                 "threads", "used")  # fmt: skip

    def __init__(self, compiled: Any, index: int, used: list[int], formats: list[str]) -> None:
        self.compiled = compiled  # the function lives as long
        self.call, self.function, self.index = _cuda().cuLaunchKernel, compiled.function, index
        self.threads, self.shared = compiled.metadata.num_warps * 32, compiled.metadata.shared
        self.used, self.formats, self.more = used, formats, [0] * (len(formats) - len(used))
        self.buffers: dict[int, tuple[Any, Any, Any]] = {}

    @staticmethod
    def of(compiled: Any, index: int) -> _Driver | None:
        """Return the kernel's launcher, None where anything is not as this class reads it."""
        try:
            parameters = _Driver.parameters(compiled)
            if parameters is not None and compiled.function is not None:
                return _Driver(compiled, index, *parameters)
        except (AttributeError, KeyError, OSError):  # not the Triton, or the driver, that it knows
            pass
        return None

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

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        index = self.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(grid, args)
            return
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        if len(self.used) != len(values):
            values = [values[i] for i in self.used]
        buffer, pointers, pack = self.buffers.get(get_ident()) or self._buffer()
        pack(buffer, 0, *values, *self.more)
        launch = (self.function, *grid, self.threads, 1, 1, self.shared, stream_of(index), pointers)
        error = self.call(*launch, None)
        if error == _NO_CONTEXT:
            _enter(index)
            error = self.call(*launch, None)
        if error:
            raise RuntimeError(f"the CUDA driver refused to launch a kernel (error {error}).")

    def _buffer(self) -> tuple[Any, Any, Any]:
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
