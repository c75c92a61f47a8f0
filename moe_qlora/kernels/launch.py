"""Launches kernels with little of the host's time, on the device where their tensors lie.

A layer's step launches some 20 kernels of up to 30 arguments, and up to a few thousand tokens the
host is what it waits for. Triton finds a compiled kernel anew at each launch, by the types of all
arguments and all constants. Here what it found is kept by what its choice depends on: a constant's
value, a pointer's dtype and whether it is a multiple of 16, whether an integer is 1 or a multiple
of 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

_OPTIONS = frozenset({"num_warps", "num_stages", "enable_fp_fusion"})

_found: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels and their constants in the order of the signature."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own takes 5 us a call, and a step has some 25."""
    return -(-a // b)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)`.

    Args:
        kernel: A Triton or Gluon function, whose constants follow all other arguments.
        grid: One to three sizes.
        args: Tensors and numbers; the first is a tensor.
        constants: Constants, and Triton's options.

    Raises:
        ValueError: The tensors lie on several devices.
    """
    index = args[0].get_device()
    if index < 0:  # the interpreter
        kernel[grid](*args, **constants)
        return
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, *args, **constants)
        return
    kinds, plain = _described(args, index)
    key = (kernel, index, kinds, tuple(constants.values()))
    found = _found.get(key)
    if found is not None:
        compiled, values = found
        stream = triton.runtime.driver.active.get_current_stream(index)
        compiled[(*grid, 1, 1)](*plain, *values, stream=stream)
        return
    compiled = kernel[grid](*args, **constants)
    if not isinstance(compiled, triton.compiler.CompiledKernel) or kernel.pre_run_hooks:
        return
    values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
    if len(values) + len(_OPTIONS.intersection(constants)) == len(constants):
        _found[key] = compiled, values


def _described(args: tuple[Any, ...], index: int) -> tuple[tuple[Any, ...], list[Any]]:
    """What Triton's choice of a compiled kernel depends on, and what to launch it with.

    Given a tensor's address, Triton's launcher asks neither the tensor nor the driver about it.
    """
    kinds: list[Any] = []
    plain: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            if value.get_device() != index:
                devices = ", ".join(sorted({str(a.device) for a in args if isinstance(a, Tensor)}))
                raise ValueError(f"the tensors of one kernel lie on several devices: {devices}.")
            address = value.data_ptr()
            kinds.append(value.dtype if address % 16 == 0 else (value.dtype,))
            plain.append(address)
            continue
        plain.append(value)
        if isinstance(value, int):
            kinds.append((value == 1, value % 16 == 0, -(2**31) <= value < 2**31))
        else:
            kinds.append(type(value))
    return tuple(kinds), plain
