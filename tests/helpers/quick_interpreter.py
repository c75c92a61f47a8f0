"""Triton's interpreter, without what it computes again for every operation or throws away.

Neither results nor checks change. This stands on internals of Triton 3.5 and 3.6.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

core: Any = tl.core


@functools.cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape and the number of elements, as a tensor holds them."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - may be passed by name
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = tuple(type.shape.values) if isinstance(type, core.block_type) else ()
    self.shape, self.numel = _tensor_shape(sizes)


@functools.cache
def _block(sizes: tuple[int, ...], element: str) -> tuple[Any, int, str]:
    """The shape, the number of elements and the name of a block type, checked."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = core.tuple(sizes)
    return shape, core.validate_block_shape(shape), f"<{shape}, {element}>"


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block(sizes, str(element_ty))


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter as long as `patch` lasts."""
    patch.setattr(core.tensor, "__init__", _init_tensor)
    patch.setattr(core.block_type, "__init__", _init_block_type)

    # Three more operations look for the overflow of an integer one, for an assertion that only
    # debug mode executes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)

    # A new table of all dtypes each time.
    np_dtype, known = interpreter._get_np_dtype, dict[str, np.dtype]()

    def remembered(dtype: Any) -> np.dtype:
        if dtype.name not in known:
            known[dtype.name] = np_dtype(dtype)
        return known[dtype.name]

    patch.setattr(interpreter, "_get_np_dtype", remembered)

    # Each call of a function within a kernel searches the language for what is to be patched.
    patched: set[str] = set()
    run = interpreter.GridExecutor.__call__

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    patch.setattr(interpreter.GridExecutor, "__call__", run_kernel)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
