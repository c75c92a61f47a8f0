"""The forward of the first projection alone, for `layer.py --part gate_up`.

Sorted rows come in and rows go out: no gather, no LoRA, no gate. Timed call by call, which below a
few hundred tokens is the host's time, and in a CUDA graph, which is the device's; before each call
the device's second cache is flushed, as a model's other layers would.

    ours        nf4 with double quantization, multiplied on its codes
    decode      the same codes, decoded by our kernel into a buffer, torch's grouped_mm
    bnb         the same codes, decoded by bitsandbytes, torch's grouped_mm
    frozen      bf16 weights, torch's grouped_mm

The floors count the product, and the bytes of codes (of experts that have rows) and of both rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import BYTES, FLOPS, Rows, cold_times, release
from peers import UnavailableError, build
from torch import Tensor

from moe_qlora.kernels.limits import ROWS_ON_QUANTIZED
from moe_qlora.packing import codec
from moe_qlora.packing.settings import CodecSettings

PEERS = ("ours", "decode", "bnb", "frozen")
NF4 = CodecSettings("nf4", True, torch.uint8)
TOLERANCE = 0.02
"""Of the error's norm against the product with what bitsandbytes decodes."""


def measure(
    peer: str, options: argparse.Namespace, tokens: int, device: torch.device, rows: Rows
) -> None:
    """Times, peak and ratios to the floors of one peer.

    Raises:
        UnavailableError: It needs a GPU.
        RuntimeError: It is not the product.
    """
    torch.manual_seed(0)
    holder, top_k = build(options, device)
    experts = holder.experts
    weight = (experts.gate_up_proj if experts.has_gate else experts.up_proj).data
    transposed = bool(experts.is_transposed)
    del holder, experts
    count, size = len(weight), weight.shape[1 if transposed else 2]
    index = torch.rand(tokens, count, device=device).topk(top_k, -1).indices
    keys, order = index.reshape(-1).sort(stable=True)
    edges = torch.arange(count + 1, device=device)
    bounds = torch.searchsorted(keys, edges, out_int32=True)
    x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16)[order // top_k]
    matrix = weight.numel() // count
    run, expected = _product(peer, weight, x, index, bounds, transposed)
    del weight
    with torch.no_grad():
        y = run()
        error = float((y - expected).float().norm() / expected.float().norm())
        if not error < TOLERANCE:
            raise RuntimeError(f"{peer} is off by {error:.3g} of the product's norm")
        flops = 2 * len(x) * matrix / FLOPS * 1e3
        moved = index.unique().numel() * matrix * 0.516 + x.nbytes + y.nbytes
        floor = moved / BYTES * 1e3
        del y, expected
        release(device)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            run()
            peak = torch.cuda.max_memory_allocated(device) - before
            rows.add("gate_up peak", "MiB", peak / 2**20)
        for name, call in _ways(run, device):
            taken = cold_times(call, device, options.repeat)
            rows.add(name, "ms", *taken)
            rows.add(f"{name} over FLOP floor", "x", *(ms / flops for ms in taken))
            rows.add(f"{name} over byte floor", "x", *(ms / floor for ms in taken))


def _ways(run: Callable[[], Tensor], device: torch.device) -> list[tuple[str, Callable[[], Any]]]:
    ways: list[tuple[str, Callable[[], Any]]] = [("gate_up forward", run)]
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        ways.append(("gate_up forward in a graph", graph.replay))
    return ways


def _product(
    peer: str, weight: Tensor, x: Tensor, index: Tensor, bounds: Tensor, transposed: bool
) -> tuple[Callable[[], Tensor], Tensor]:
    """What the peer runs, and what is to come out."""

    def grouped(stack: Tensor) -> Tensor:
        right = stack if transposed else stack.transpose(1, 2)
        out: Tensor = F.grouped_mm(x, right, offs=bounds[1:])
        return out

    if peer == "frozen":
        return lambda: grouped(weight), grouped(weight)
    stack = codec.pack(weight, NF4)
    expected = grouped(codec.unpack(stack))
    if peer == "bnb":
        return lambda: grouped(_theirs(stack)), expected
    if x.device.type != "cuda":
        raise UnavailableError("our kernels need a GPU")
    if peer == "ours":
        return _on_codes(stack, x, index, transposed), expected
    from moe_qlora.kernels import grouped_mm

    shape = weight.shape

    def decoded() -> Tensor:
        room = torch.empty(shape, dtype=x.dtype, device=x.device)
        grouped_mm.decode(stack, room, expert_offsets=bounds)
        return grouped(room)

    return decoded, expected


def _theirs(stack: Any) -> Tensor:
    from bitsandbytes import functional

    from moe_qlora.packing.decoders import to_quant_state

    out: Tensor = functional.dequantize_4bit(stack.codes, to_quant_state(stack))
    return out.view(stack.shape)


def _on_codes(stack: Any, x: Tensor, index: Tensor, transposed: bool) -> Callable[[], Tensor]:
    from moe_qlora.kernels import routing as routing_
    from moe_qlora.kernels import table

    if x.is_cuda:
        table.prepare(x.device)
    # On codes at any number of rows: by the kernel that the table has for no more than these.
    rows = min(index.numel(), ROWS_ON_QUANTIZED * stack.experts)
    matmul = table.choose(stack, rows, x.dtype, by_rows=not transposed)
    if not matmul.kernel.on_codes:
        raise NotImplementedError("no products on codes: blocks do not lie within rows")
    kernel, problem = matmul.kernel, matmul.problem._replace(rows=index.numel())
    tile = kernel.tile(problem)
    matmul = matmul._replace(problem=problem, tile=tile, cut=kernel.cut(problem, tile))
    routing, reorder = routing_.route(index, stack.experts), kernel.reorder
    return lambda: table.multiply(x if reorder is None else reorder(x), matmul, routing)
