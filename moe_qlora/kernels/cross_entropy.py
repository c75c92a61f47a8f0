"""The loss of a language model's head in chunks, without waiting for its result.

    loss = sum over rows with a label of (logsumexp(z) - z[label]),  z = hidden @ weight.T

Of each chunk of rows the logits are computed, replaced by their gradients and multiplied by the
weight, so that no more than a chunk of them is there at once, as in Liger's loss
(https://arxiv.org/abs/2410.10989). That one reads the number of labels, and later the gradient of
the loss, from the device, which then waits for the host: up to 1.8 of 202 ms a step (48 layers of
Qwen3-30B-A3B, 4,096 tokens, one H100). Here both stay on the device. Rows without a label are left
out of both products where their number is known.

The kernel reads a row twice and writes it once, and takes as long as Liger's: 155 us for 512 rows
of 151,936 columns (H100).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lang import tl, triton
from .launch import Geometry, aligned, launcher
from .limits import cdiv

IGNORED = -100
"""The label of rows without a loss, as torch has it."""

_MULTIPLE = 256
"""Rows with a label are counted in these, so that products have few sizes for cuBLAS to know."""

_BLOCK, _WARPS = 8192, 16
_LOG2_E = tl.constexpr(1.4426950408889634)


def loss_and_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    labelled: int | None,
    gradients: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the rows' cross entropy, `()` float32, and its gradient by `hidden`.

    Args:
        hidden: `(N, H)`.
        weight: `(V, H)` of hidden's dtype.
        labels: `(N,)` int64, `IGNORED` for rows without a loss.
        chunk: Rows whose logits are there at once.
        labelled: How many rows have a label, if that is known; not fewer.
        gradients: False returns None in the gradient's place.

    Raises:
        ValueError: There are not as many labels as rows.
    """
    if len(labels) != len(hidden):
        raise ValueError(f"{len(labels)} labels were given for {len(hidden)} hidden states")
    count, labels, order = len(labels), aligned(labels.contiguous()), None
    if labelled is not None and (some := cdiv(max(labelled, 1), _MULTIPLE) * _MULTIPLE) < count:
        order = torch.argsort((labels == IGNORED).to(torch.uint8), stable=True)[:some]
        hidden, labels = hidden.index_select(0, order), labels.index_select(0, order)
    rows = len(labels)
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    logits = hidden.new_empty(min(chunk, rows), len(weight))
    gradient = torch.empty_like(hidden) if gradients else None
    for start in range(0, rows, chunk):
        here = slice(start, min(start + chunk, rows))
        z = logits[: here.stop - start]
        torch.mm(hidden[here], weight.t(), out=z)
        cross_entropy_(z, labels[here], losses[here], gradients=gradients)
        if gradient is not None:
            torch.mm(z, weight, out=gradient[here])
    if gradient is not None and order is not None:
        every = gradient.new_zeros(count, gradient.shape[1])
        gradient = every.index_copy_(0, order, gradient)
    return losses.sum(), gradient


def cross_entropy_(logits: Tensor, labels: Tensor, losses: Tensor, *, gradients: bool) -> None:
    """Write the losses of rows, and with `gradients` replace the logits by theirs.

    Args:
        logits: `(R, V)`, contiguous, of 16 or 32 bits; changed.
        labels: `(R,)` int64. Rows of `IGNORED` have loss and gradients 0; those of a label that is
            no column have NaN.
        losses: `(R,)` float32; written.
        gradients: False leaves the logits as they are.
    """
    rows, columns = logits.shape
    _launch((rows, columns, gradients), logits, labels, losses)


@triton.jit
def cross_entropy_kernel(
    logits, labels, losses, V: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program, in blocks of columns; arithmetic in float32, powers of two."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    n = tl.arange(0, BLOCK)
    if label == -100:
        tl.store(losses + row, 0.0)
        if GRADIENTS:
            for i in range(0, V, BLOCK):
                tl.store(logits + i + n, tl.zeros([BLOCK], logits.dtype.element_ty), i + n < V)
    else:
        known = (label >= 0) & (label < V)
        own = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        # Each place of the block for itself; they meet after the last block.
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(0, V, BLOCK):
            x = (
                tl.load(logits + i + n, mask=i + n < V, other=float("-inf")).to(tl.float32)
                * _LOG2_E
            )
            new = tl.maximum(most, x)
            # A place without a number yet: -inf less -inf would be NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(most - base) + tl.exp2(x - base)
            most = new
        top = tl.max(most, 0)
        total = tl.sum(total * tl.exp2(most - top), 0)
        lse = top + tl.log2(total)
        tl.store(losses + row, (lse - own * _LOG2_E) / _LOG2_E)
        if GRADIENTS:
            for i in range(0, V, BLOCK):
                spot = i + n
                x = tl.load(logits + spot, mask=spot < V, other=0.0).to(tl.float32) * _LOG2_E
                # The label's own here, not in a second store: its difference is rounded once.
                gradient = tl.exp2(x - lse) - tl.where(spot == label, 1.0, 0.0)
                gradient = tl.where(known, gradient, float("nan"))
                tl.store(logits + spot, gradient.to(logits.dtype.element_ty), spot < V)


@launcher(cross_entropy_kernel)
def _launch(rows: int, columns: int, gradients: bool) -> Geometry:
    block = min(_BLOCK, triton.next_power_of_2(columns))
    return (rows,), {
        "V": columns, "GRADIENTS": gradients, "BLOCK": block,
        "num_warps": max(1, min(_WARPS, block // 512)),
    }  # fmt: skip
