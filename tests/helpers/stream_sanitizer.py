"""Steps with experts in host memory under torch's CUDA stream sanitizer, which this script teaches.

    python tests/helpers/stream_sanitizer.py            must report no race
    python tests/helpers/stream_sanitizer.py wait       kernels overtake copies: must report one
    python tests/helpers/stream_sanitizer.py after      copies overtake kernels: likewise

The sanitizer (torch/cuda/_sanitizer.py) sees torch's operators, streams and events, and knows a
tensor by its address. So Triton's launches are declared to it here, and what reads or writes a part
of a slot does so to the slot. It cannot be switched off again: it needs a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils.checkpoint import set_checkpoint_early_stop

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from graphed import batch, gradients, packed  # noqa: E402

import moe_qlora  # noqa: E402
from moe_qlora.kernels.launch import Launcher  # noqa: E402
from moe_qlora.speed.slots import CudaCopier  # noqa: E402

_slots: list[Tensor] = []


def _slot_of(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.is_cuda:
        return None
    address = value.data_ptr()
    return next((s for s in _slots if 0 <= address - s.data_ptr() < s.nbytes), None)


def teach() -> None:
    """Let the sanitizer know slots, and the launches of this package."""
    empty, call = CudaCopier.empty, Launcher.__call__
    handle = _sanitizer.ArgumentHandler._handle_argument
    handler = _sanitizer.cuda_sanitizer.dispatch.event_handler

    def slot(self: CudaCopier, nbytes: int) -> Tensor:
        _slots.append(empty(self, nbytes))
        return _slots[-1]

    def argument(self: Any, value: Any, *args: Any, **rest: Any) -> None:
        whole = _slot_of(value)
        handle(self, value if whole is None else whole, *args, **rest)

    def declared(self: Launcher, sizes: tuple[Any, ...], *args: Any) -> None:
        read = {whole.data_ptr() for arg in args if (whole := _slot_of(arg)) is not None}
        errors = handler._handle_kernel_launch(
            torch.cuda.current_stream().cuda_stream, read, set(), set(), "a kernel of moe_qlora",
            {address: [] for address in read},
        )  # fmt: skip
        for error in errors:
            print(error, file=sys.stderr)
        if errors:
            raise _sanitizer.CUDASanitizerErrors(errors)
        call(self, sizes, *args)

    for owner, name, function in (
        (CudaCopier, "empty", slot),
        (Launcher, "__call__", declared),
        (_sanitizer.ArgumentHandler, "_handle_argument", argument),
    ):
        setattr(owner, name, function)


def plant(fault: str) -> None:
    """Leave out one of the two waits."""
    copy = CudaCopier.copy

    def overtaking(self: CudaCopier, to: Tensor, source: Tensor, after: Iterable[Any]) -> Any:
        return copy(self, to, source, ())

    def reading(self: CudaCopier, stream: Any, event: Any) -> None:
        pass

    if fault:
        name, function = {"wait": ("wait", reading), "after": ("copy", overtaking)}[fault]
        setattr(CudaCopier, name, function)


def main(fault: str) -> None:
    """Run three steps, the layers computed again."""
    _sanitizer.enable_cuda_sanitizer()
    teach()
    plant(fault)
    model = packed("qwen3_moe", {"num_hidden_layers": 5})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    # A recomputation that ends early raises, and torch 2.11 loses the exception where allocations
    # are traced, as they are here: https://github.com/pytorch/pytorch/issues/179536
    with moe_qlora.offload_experts(model), set_checkpoint_early_stop(False):
        for step in range(3):
            gradients(model, batch(step))
    print("no race was found")


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
