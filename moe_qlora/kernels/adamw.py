"""AdamW's step over many tensors in one launch.

torch's fused kernel takes some 20 tensors of LoRA's size a launch, in 30 launches one after the
other: 4.2 ms for 642 M weights in bf16 on an H100, whose memory moves the 8.8 GB in 2.6. Here a
table of addresses says what each program updates, so that the card is full until the last one.

The arithmetic is torch's (aten/src/ATen/native/cuda/fused_adam_utils.cuh), in its order, in fp32
with IEEE's division and root. Some versions of torch compute with doubles between: one result in
some 4,000 of its version 2.11 is rounded to another neighbour (H100).

A launch of `counts_kernel` advances the step counts and computes the bias corrections, which are
two powers a tensor and not two a program; one of `adamw_kernel` updates the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lang import HAS_TRITON, tl, triton
from .launch import Geometry, launcher
from .limits import cdiv

if HAS_TRITON:
    from triton.language.extra import libdevice

DTYPES = torch.float32, torch.bfloat16, torch.float16

_BLOCK, _WARPS = 1024, 4
"""Elements and warps of a program. 8 elements a thread are a load of 16 bytes of each tensor in
bf16, and 64 registers: half of a multiprocessor's threads are there at a time, and load 64 KiB.
With 16 elements they are 206 registers, and an eighth of the threads."""

_COUNTS = 128
"""Tensors whose counts one program advances."""


class Row(NamedTuple):
    """What the table says of a tensor: its number of elements, and addresses."""

    numel: int
    p: int
    exp_avg: int
    exp_avg_sq: int
    step: int  # A number in fp32


_COLUMNS = len(Row._fields)


class Tables(NamedTuple):
    """What the programs look up of N tensors, on their device."""

    rows: Tensor  # (N, 5) int64: `Row`s
    programs: Tensor  # (P,) int64: tensor << 32 | block of `_BLOCK` elements
    corrections: Tensor  # (N, 2) fp32, of the last step: 1 - beta1^step, sqrt(1 - beta2^step)


class Kind(NamedTuple):
    """What the tensors of a launch have in common, and a kernel is compiled for."""

    p: torch.dtype  # One of `DTYPES`, as the two others
    grad: torch.dtype
    state: torch.dtype  # Of exp_avg and exp_avg_sq
    aligned: bool  # Whether p, grad, exp_avg and exp_avg_sq start at multiples of 16 bytes


def tabulate(rows: list[Row], device: torch.device) -> Tables:
    """Return the tables of some tensors, of at most 2^31 blocks in all; without synchronizing."""
    blocks = torch.tensor([cdiv(row.numel, _BLOCK) for row in rows], device="cpu")
    tensor = torch.arange(len(rows), device="cpu").repeat_interleave(blocks)
    block = torch.arange(len(tensor), device="cpu") - (blocks.cumsum(0) - blocks)[tensor]
    return Tables(
        to_device(rows, device),
        to_device(tensor << 32 | block, device),
        torch.empty(len(rows), 2, dtype=torch.float32, device=device),
    )


def to_device(numbers: Any, device: torch.device) -> Tensor:
    """Return integers, of lists or on the CPU, as int64 on the device, without synchronizing.

    torch's allocator of pinned memory gives a block out again only once copies from it are done.
    """
    numbers = torch.as_tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def advance(tables: Tables, beta1: float, beta2: float) -> None:
    """Add 1 to the step counts, and compute the corrections that `update` reads."""
    sizes = len(tables.rows), tables.rows.is_cuda
    _launch_counts(sizes, tables.rows, tables.corrections, sizes[0], float(beta1), float(beta2))


def update(
    kind: Kind, tables: Tables, grads: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    """Do a step of AdamW, after `advance`; the numbers are rounded to fp32.

    Args:
        kind: What the tensors are.
        tables: From `tabulate`, for contiguous tensors on one device.
        grads: Addresses of the gradients `(N,)`, int64, there.
        lr: Learning rate, as torch's and the other numbers are.
        beta1: Of exp_avg.
        beta2: Of exp_avg_sq.
        eps: Added to the denominator.
        weight_decay: Decoupled; times lr.
    """
    numbers = map(float, (lr, beta1, beta2, eps, weight_decay))
    sizes = len(tables.programs), kind, weight_decay != 0
    _launch(sizes, tables.rows, grads, tables.programs, tables.corrections, *numbers)


@triton.jit(do_not_specialize=["tensors", "beta1", "beta2"])
def counts_kernel(
    rows, corrections, tensors, beta1, beta2,
    LIBDEVICE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advance the counts of some tensors; powers are rounded to fp32 before 1 - them, as torch's.

    With CUDA's `powf`, as in torch's kernel, most corrections are the same to the bit. Where a
    power's last bit is another, that is 3e-5 of a correction at the first steps.
    """
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = tensor < tensors
    address = tl.load(rows + tensor * COLUMNS + 4, mask=live, other=0)
    count = address.to(tl.pointer_type(tl.float32))
    step = tl.load(count, mask=live, other=0.0) + 1.0
    if LIBDEVICE:
        power1, power2 = libdevice.pow(beta1, step), libdevice.pow(beta2, step)
    else:  # The interpreter calls no library
        wide = step.to(tl.float64)
        power1 = tl.exp2(wide * tl.log2(tl.full([1], beta1, tl.float64))).to(tl.float32)
        power2 = tl.exp2(wide * tl.log2(tl.full([1], beta2, tl.float64))).to(tl.float32)
    tl.store(count, step, mask=live)
    tl.store(corrections + 2 * tensor, 1.0 - power1, mask=live)
    tl.store(corrections + 2 * tensor + 1, tl.sqrt_rn(1.0 - power2), mask=live)


@launcher(counts_kernel)
def _launch_counts(tensors: int, on_cuda: bool) -> Geometry:
    return (cdiv(tensors, _COUNTS),), {
        "LIBDEVICE": on_cuda, "COLUMNS": _COLUMNS, "BLOCK": _COUNTS, "num_warps": 4,
    }  # fmt: skip


@triton.jit
def _at(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to an address."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    p, grad, exp_avg, exp_avg_sq, rest, correction1, root2, lr, beta1, beta2, eps, weight_decay,
    DECAYS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the `rest` elements of a block, or all if FULL: a mask splits loads of 16 bytes."""
    i = tl.arange(0, BLOCK)
    mask = None if FULL else i < rest
    x = tl.load(p + i, mask=mask).to(tl.float32)
    g = tl.load(grad + i, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + i, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + i, mask=mask).to(tl.float32)
    if DECAYS:
        x = tl.fma(x, -(lr * weight_decay), x)
    square = g * g
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    v = tl.fma(v, beta2, tl.fma(square, -beta2, square))
    denominator = tl.div_rn(tl.sqrt_rn(v), root2) + eps
    x -= tl.div_rn(tl.div_rn(lr, correction1) * m, denominator)
    tl.store(p + i, x.to(p.dtype.element_ty), mask=mask)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps", "weight_decay"])
def adamw_kernel(
    rows, grads, programs, corrections, lr, beta1, beta2, eps, weight_decay,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr,
    DECAYS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of a tensor, both of them looked up."""
    program = tl.load(programs + tl.program_id(0))
    tensor, first = program >> 32, (program & 0xFFFFFFFF) * BLOCK
    row = rows + tensor * COLUMNS
    rest = tl.load(row) - first
    p = _at(tl.load(row + 1), P, ALIGNED) + first
    exp_avg = _at(tl.load(row + 2), S, ALIGNED) + first
    exp_avg_sq = _at(tl.load(row + 3), S, ALIGNED) + first
    grad = _at(tl.load(grads + tensor), G, ALIGNED) + first
    correction1 = tl.load(corrections + 2 * tensor)
    root2 = tl.load(corrections + 2 * tensor + 1)
    if rest >= BLOCK:
        _update(
            p, grad, exp_avg, exp_avg_sq, rest, correction1, root2, lr, beta1, beta2, eps,
            weight_decay, DECAYS, True, BLOCK,
        )  # fmt: skip
    else:
        _update(
            p, grad, exp_avg, exp_avg_sq, rest, correction1, root2, lr, beta1, beta2, eps,
            weight_decay, DECAYS, False, BLOCK,
        )  # fmt: skip


@launcher(adamw_kernel)
def _launch(programs: int, kind: Kind, decays: bool) -> Geometry:
    p, grad, state = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in kind[:3])
    return (programs,), {
        "P": p, "G": grad, "S": state, "ALIGNED": kind.aligned, "DECAYS": decays,
        "COLUMNS": _COLUMNS, "BLOCK": _BLOCK, "num_warps": _WARPS,
    }  # fmt: skip
