"""What is kept between launches, and what the driver is handed, without a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from moe_qlora.kernels import launch as launching  # noqa: E402
from moe_qlora.kernels.launch import Launcher, launcher  # noqa: E402

PTX = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u32 kernel_param_2,
    .param .f32 kernel_param_3{more}
)
.reqntid 128
{{
    ld.param.u64 %rd1, [kernel_param_0];
}}
"""
SCRATCH = ",\n    .param .u64 .ptr .global .align 1 kernel_param_4"


class Compiled(triton.compiler.CompiledKernel):
    """A compiled kernel that records how Triton launches it."""

    def __init__(self, more=SCRATCH, **metadata):
        plain = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False,
                 "global_scratch_size": 0, "profile_scratch_size": 0, "num_warps": 4,
                 "shared": 96}  # fmt: skip
        kinds = ["*fp32", "*fp16", "i32", "constexpr", "fp32", "constexpr", "constexpr"]
        self.src = SimpleNamespace(signature=dict(enumerate(kinds)))
        self.asm = {"ptx": PTX.format(more=more)}
        self.metadata = SimpleNamespace(**{**plain, **metadata})
        self.name, self.kernel, self.seen = "kernel", b"", []
        self.module = None  # Triton 3.9 unloads it

    def __getitem__(self, grid):
        return lambda *args, stream: self.seen.append((grid, args, stream))


class Kernel:
    """A kernel (x, y, n, one, scale, FLAG, SIZE) whose compilations are counted."""

    arg_names = ("x", "y", "n", "one", "scale", "FLAG", "SIZE")

    def __init__(self, **compiled):
        self.made, self.compiled = [], compiled

    def warmup(self, *args, grid, **constants):
        self.made.append(Compiled(**self.compiled))
        return self.made[-1]

    def __getitem__(self, grid):
        return lambda *args, **constants: self.warmup(*args, grid=grid, **constants)


@pytest.fixture
def driver(monkeypatch):
    """A driver that reads what it is handed; `errors` are what its next calls return."""
    calls = []
    errors = []

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        read = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64]
        values = [
            kind.from_address(address).value for kind, address in zip(read, pointers, strict=False)
        ]
        assert sys._getframe(1).f_code is Launcher.__call__.__code__  # with no function between
        calls.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, values))
        return errors.pop(0) if errors else 0

    library = SimpleNamespace(cuLaunchKernel=launch)
    utils = SimpleNamespace(load_binary=lambda name, kernel, shared, index: (None, 4321, 0, 0, 0))
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", active)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: -1 if self.is_meta else 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(launching, "stream_of", lambda index: 70 + index)
    monkeypatch.setattr(launching, "_cuda", lambda: library)
    return SimpleNamespace(calls=calls, errors=errors)


def tensors():
    return torch.zeros(64), torch.zeros(64, dtype=torch.float16)


def launching_of(kernel, *grid):
    """A launcher whose grid is its sizes, after `grid`."""
    return Launcher(kernel, lambda *sizes: ((*grid, *sizes), {"SIZE": 16, "FLAG": True}))


@pytest.mark.parametrize("more", ["", SCRATCH])
def test_the_driver_gets_addresses_and_numbers(driver, more):
    kernel = Kernel(more=more)
    step = launching_of(kernel, 4, 2)
    for size in (5, -6, 7):
        x, y = tensors()
        step((), x, y, size, 1, 0.5)
    assert len(kernel.made) == 1 and not kernel.made[0].seen
    assert len(driver.calls) == 3
    scratch = [0] if more else []
    values = [x.data_ptr(), y.data_ptr(), 7, 0.5, *scratch]
    assert driver.calls[2] == (4321, (4, 2, 1), (128, 1, 1), 96, 70, values)
    assert driver.calls[1][-1][2] == -6


def test_each_thread_has_a_buffer_of_its_own(driver):
    step = launching_of(Kernel(), 1)
    x, y = tensors()
    step((), x, y, 5, 1, 0.5)
    step((), x, y, 6, 1, 0.5)
    worker = threading.Thread(target=lambda: step((), x, y, 7, 1, 0.5))
    worker.start()
    worker.join()
    assert [call[-1][2] for call in driver.calls] == [5, 6, 7]
    (kept,) = step.cache.values()
    assert len(kept.buffers) == 2


@pytest.mark.parametrize(
    "compiled",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"global_scratch_size": 128},
        {"more": ",\n    .param .u32 kernel_param_4"},
        {"more": ",\n    .param .align 64 .b8 kernel_param_4[128]"},
    ],
)
def test_what_is_not_plain_goes_through_triton(driver, compiled):
    kernel = Kernel(**compiled)
    step = launching_of(kernel, 4, 2)
    x, y = tensors()
    for _ in range(3):
        step((), x, y, 5, 1, 0.5)
    (made,) = kernel.made
    assert not driver.calls
    assert made.seen == [((4, 2, 1), (x.data_ptr(), y.data_ptr(), 5, 1, 0.5, True, 16), 70)] * 3


def test_errors_of_the_driver_are_raised_and_a_thread_without_context_gets_one(driver, monkeypatch):
    entered = []
    monkeypatch.setattr(launching, "_enter", entered.append)
    step = launching_of(Kernel(), 1)
    x, y = tensors()
    step((), x, y, 5, 1, 0.5)
    driver.errors[:] = [201]
    step((), x, y, 5, 1, 0.5)
    assert entered == [0] and len(driver.calls) == 3
    driver.errors[:] = [701]
    with pytest.raises(RuntimeError, match=r"refused to launch a kernel \(error 701\)"):
        step((), x, y, 5, 1, 0.5)


def test_nothing_is_kept_of_an_address_that_is_no_multiple_of_16(driver):
    kernel = Kernel()
    step = launching_of(kernel, 1)
    x, y = tensors()
    for _ in range(2):
        step((), x[1:], y, 5, 1, 0.5)
    assert len(kernel.made) == 2 and not step.cache
    assert launching.aligned(x) is x
    moved = launching.aligned(x[1:])
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved, x[1:])


def test_an_empty_grid_launches_nothing(driver):
    kernel = Kernel()
    launching_of(kernel, 0, 3)((), *tensors(), 5, 1, 0.5)
    assert not kernel.made and not driver.calls


def test_tensors_of_other_devices_are_refused(driver):
    x = torch.empty(64)
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        launching_of(Kernel(), 1)((), x, torch.empty(64, device="meta"), 5, 1, 0.5)


def test_a_launch_is_kept_for_each_size_and_dtype(driver):
    """What grid, constants and the compiled kernel depend on, and nothing else."""
    kernel = Kernel()

    @launcher(kernel)
    def step(size):
        return (size,), {"SIZE": size, "FLAG": True}

    x, y = tensors()
    for sizes, first in [((2,), x), ((2,), x), ((3,), x), ((2,), y), ((2,), x), ((3,), x)]:
        step(sizes, first, y, 5, 1, 0.5)
    assert len(kernel.made) == len(step.cache) == 3
    assert [call[1][0] for call in driver.calls] == [2, 2, 3, 2, 2, 3]


def test_the_oldest_launch_is_forgotten(driver, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_CACHED", 2)
    kernel = Kernel()
    step = launching_of(kernel)
    x, y = tensors()
    for size in (1, 2, 3, 2, 3, 1):
        step((size,), x, y, 5, 1, 0.5)
    assert len(kernel.made) == 4 and len(step.cache) == 2
