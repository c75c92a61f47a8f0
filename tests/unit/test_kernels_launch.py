"""What is kept between launches, and what the compiled kernels are handed, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
from moe_qlora.kernels import launch as launching  # noqa: E402


class Compiled(triton.compiler.CompiledKernel):
    """A compiled kernel that records what it is launched with."""

    def __init__(self) -> None:
        self.seen = []

    def __getitem__(self, grid):
        return lambda *args, stream: self.seen.append((grid, args, stream))


class Kernel:
    """A kernel (x, y, n, scale, FLAG, SIZE) whose compilations are counted."""

    arg_names = ("x", "y", "n", "scale", "FLAG", "SIZE")
    pre_run_hooks = ()

    def __init__(self) -> None:
        self.compiled = []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: -1 if self.is_meta else 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver = SimpleNamespace(get_current_stream=lambda index: 70 + index)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(launching, "_found", {})
    return Kernel()


def test_addresses_and_constants_in_the_order_of_the_signature(kernel):
    x, y = torch.empty(64), torch.empty(64, dtype=torch.float16)
    for _ in range(3):
        launching.launch(kernel, (4, 2), x, y, 5, 0.5, SIZE=16, FLAG=True, num_warps=4)
    (compiled,) = kernel.compiled
    args = (x.data_ptr(), y.data_ptr(), 5, 0.5, True, 16)
    assert compiled.seen == [((4, 2, 1, 1), args, 70)] * 2


def test_compiled_anew_where_triton_would(kernel):
    x, y = torch.empty(64), torch.empty(64, dtype=torch.float16)

    def compilations(*args, **constants):
        launching.launch(kernel, (1,), *args, **{"FLAG": True, "SIZE": 16, **constants})
        return len(kernel.compiled)

    assert compilations(x, y, 5, 0.5) == 1
    assert compilations(y, x, 5, 0.5) == 2  # dtypes
    assert compilations(x[1:], y, 5, 0.5) == 3  # an address that is no multiple of 16
    assert compilations(x, y[1:], 5, 0.5) == 4
    assert compilations(x, y, 1, 0.5) == 5
    assert compilations(x, y, 32, 0.5) == 6
    assert compilations(x, y, 2**31, 0.5) == 7
    assert compilations(x, y, 5, 0.5, SIZE=32) == 8
    assert compilations(x[4:], y, 7, 2.5) == 8  # other values of the same kinds
    assert compilations(x, y, 48, 0.5) == 8


def test_tensors_of_other_devices_are_refused(kernel):
    x, y = torch.empty(64), torch.empty(64, device="meta")
    launching.launch(kernel, (1,), x, x, 5, 0.5, FLAG=True, SIZE=16)
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        launching.launch(kernel, (1,), x, y, 5, 0.5, FLAG=True, SIZE=16)
