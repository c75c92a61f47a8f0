"""Kernels compile for the cards that they are for, without a GPU: what the interpreter cannot know.

The interpreter takes what the compiler refuses (a function whose returns differ in dtype, say), so
one small layer of each layout is sent through the compiler in a process of its own, for sm_80 and
sm_90, up to PTX, of which ptxas need not make the best code.

The matmuls, which are what runs out of registers and shared memory, go through the compiler for
five targets as they are cut untuned there, and through ptxas, whose report is held: no register is
spilled, and a program has no more shared memory than the card. (All kernels for all targets would
take minutes.) Every run has those on the most rows, for the smallest card; `.ci/run` has the layers
and each Triton's matmuls for Hopper, by `tools/test_triton`; the rest is nightly.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
from moe_qlora.kernels import (  # noqa: E402
    cards,
    gate_kernels,
    grouped_mm,
    moe_layer,
    quantized_mm,
    quantized_mm_hopper,
    quantized_mm_rs,
    routing,
    workspace,
)
from moe_qlora.kernels.factors import Factors  # noqa: E402
from moe_qlora.kernels.row_kernels import multiply_tokens  # noqa: E402
from moe_qlora.kernels.table import Matmul  # noqa: E402
from tests.helpers.fused_layer import Case, build, stack_of, tiled  # noqa: E402

ROOT = Path(__file__).parents[3]
TRITONS = sorted(Path(sys.prefix).glob("triton-3.*"))
"""The folders of `tools/test_triton`, one for each version."""

NAMES = {
    "_decode_kernel", "absmax_kernel", "count_kernel", "expert_major_kernel", "expert_minor_kernel",
    "factor_grad_kernel", "gate_backward_kernel", "gate_kernel", "grouped_kernel", "product_kernel",
    "quantized_kernel", "scan_kernel", "sort_kernel", "unpermute_kernel",
}  # fmt: skip

# Constants that say how large something is, and not how it is computed.
SIZES = {"ROWS", "COLS", "STRIDE", "K", "N", "BIG", "SE"}

SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by target (CUDA programming guide, table of
technical specifications). sm_89 has the shared memory, registers and instructions of sm_86, but for
FP8, of which nothing here is."""

REGISTERS = 65536
"""Of a multiprocessor, on all of them."""


def reports_of(folder: Path, mode: str, target: int, tile: int = 0, triton: Any = None) -> Any:
    """Run this file by itself, with the installed Triton or one of TRITONS; return its reports."""
    environment = {key: v for key, v in os.environ.items() if key != "TRITON_INTERPRET"}
    first = [] if triton is None else [str(triton)]
    environment |= {"PYTHONPATH": os.pathsep.join([*first, str(ROOT), *sys.path])}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "DISABLE_PTXAS_OPT": "1"}
    done = subprocess.run(
        [sys.executable, __file__, mode, str(target), str(tile)],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,  # a minute of work; less than where faulthandler ends the worker
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.nightly
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("triton", sorted({*TRITONS[:1], *TRITONS[-1:]}) or [None])
def test_all_kernels_compile(triton, target, tmp_path):
    reports = reports_of(tmp_path, "layers", target, triton=triton)
    own = {"reorder_kernel"} if target == 90 else set()
    assert {report["kernel"] for report in reports} == NAMES | own
    for report in reports:
        exempt = report["kernel"] in {"reorder_kernel", "quantized_kernel"}
        assert exempt or report["shared"] <= SHARED[86], report


@pytest.mark.nightly
def test_each_triton_makes_as_good_matmuls(tmp_path):
    """Its matmuls spill nothing, and as many of their programs fit a multiprocessor."""
    oldest, *newer = TRITONS or pytest.skip("tools/test_triton installs them")
    reports = reports_of(tmp_path / "0", "matmuls", 90, triton=oldest)
    before = {report["label"]: report for report in reports}
    assert len(before) == 23
    for triton in newer:
        for report in reports_of(tmp_path / triton.name, "matmuls", 90, triton=triton):
            reference = before[report["label"]]
            print(triton.name, report["label"], report["registers"], reference["registers"])
            assert report["spilled"] == reference["spilled"] == 0, report
            assert report["shared"] <= reference["shared"], report
            own, old = (REGISTERS // (r["registers"] * r["threads"]) for r in (report, reference))
            assert own >= old, (report, reference)


night = pytest.mark.nightly
CARDS = [(86, 128), *(pytest.param(target, 0, marks=night) for target in (80, 86, 90, 100, 120))]


@pytest.mark.parametrize(("target", "tile"), CARDS)
def test_matmuls_fit_their_card(target, tile, tmp_path):
    """Every run compiles those on the most rows, for the smallest card."""
    mine = reports_of(tmp_path, "matmuls", target, tile)
    assert len({report["label"] for report in mine}) == len(mine)
    assert len(mine) == (7 if tile else 23 if target == 90 else 13)
    for report in mine:
        assert not report["spilled"], report
        assert report["shared"] <= SHARED[target], report
        assert report["registers"] * report["threads"] <= REGISTERS, report
        # Only Hopper has wgmma, only datacenter Blackwell tcgen05; the others copy without bulk.
        instructions = set(report["instructions"])
        assert "mma.sync" in instructions or target in (90, 100), report
        assert "wgmma" not in instructions or target == 90, report
        assert "tcgen05" not in instructions or target == 100, report
        assert "cp.async.bulk" not in instructions or target in (90, 100), report
    many = [r for r in mine if "128 rows" in r["label"] and "hopper" not in r["label"]]
    assert len(many) == 7
    own = {90: "wgmma", 100: "tcgen05"}.get(target, "mma.sync")
    assert all(own in r["instructions"] for r in many)
    if SHARED[target] == 99 << 10:  # two share a card's 100 KiB, one of which each takes for itself
        for report in (report for report in mine if "grouped" in report["label"]):
            assert 2 * (report["shared"] + 1024) <= 100 << 10, report
            assert 2 * report["registers"] * report["threads"] <= REGISTERS, report


def without_device(capability: int) -> None:
    """Make Triton compile for a capability, without a device: all that compiling asks for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(target)


def main(mode: str, target: str, tile: str) -> None:
    """Print, in lines of JSON, what is compiled where kernels would be launched."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    capability, compile_only = int(target), JITFunction.run
    launched, assembled, compiled = set(), set(), []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # One compilation for gate_up and down, where both are computed alike.
        kinds = tuple(getattr(argument, "dtype", type(argument)) for argument in args)
        constants = frozenset(item for item in kwargs.items() if item[0] not in SIZES)
        key = self.__name__, kinds, constants
        if mode == "matmuls" or key not in launched:
            launched.add(key)
            kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
            compiled.append((self.__name__, kernel))

    without_device(capability)
    JITFunction.run = run
    CUDABackend.make_cubin = lambda self, ptx, *rest: b""  # `ptxas` makes it
    F.grouped_mm = lambda x, right, offs: x.new_empty(len(x), right.shape[-1])
    acting, labels = nullcontext(), layer_launches(capability)
    if mode == "matmuls":
        card = cards.Card("nvidia", divmod(capability, 10), SHARED[capability])
        acting = cards.acting_as(card)
        labels = chain(matmul_launches(int(tile)), hopper_launches() if capability == 90 else ())
    with acting:
        for label in labels:
            assert mode == "layers" or len(compiled) == 1, label
            for name, kernel in compiled:
                report = {"kernel": name, "label": label, "shared": kernel.metadata.shared}
                # One of each kernel, and every matmul: only these hold assembler of their own.
                if mode == "matmuls" or name not in assembled or name == "quantized_kernel":
                    report |= ptxas(kernel, capability)
                assembled.add(name)
                print(json.dumps(report), flush=True)
            compiled.clear()


def ptxas(kernel: Any, capability: int) -> dict[str, Any]:
    """Return what ptxas reports of a kernel, and the instructions that tell targets apart."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    (name,) = re.findall(r"\.target (sm_\w+)", ptx)
    assert name.removesuffix("a") == f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={name}", source.name, "-o", "out"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)[0]
    marks = ("mma.sync", "wgmma", "tcgen05", "cp.async.bulk", "cp.async.cg")
    return {
        "registers": int(re.findall(r"Used (\d+) registers", done.stderr)[0]),
        "spilled": int(stores) + int(loads),
        "threads": 32 * kernel.metadata.num_warps,
        "instructions": [mark for mark in marks if mark in ptx],
    }


def bf16(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16)


def routed(count: int, experts: int, top_k: int) -> Any:
    ints = torch.zeros(routing.ints_size(count, experts), dtype=torch.int32)
    return routing.Routing(ints, count, experts, top_k)


def matmul_launches(only: int) -> Iterator[str]:
    """Launch both matmuls, as a card cuts them, in tiles of any or `only` these rows."""
    for tile, back, kind in (
        (16, False, "nf4"), (64, False, "nf4"), (64, True, "nf4"),
        (128, False, "nf4"), (128, True, "nf4"), (128, False, "int8"), (128, True, "int8"),
        (64, False, "mxfp4"),
    ):  # fmt: skip
        if only in (0, tile):
            fetches = tile == 64 or not back
            multiply(quantized_mm.KERNEL, 192, 256, back, 16, kind, fetches, tile)
            yield f"quantized {kind}, {tile} rows, {'back' if back else 'out'}"
    cpu, offsets = torch.device("cpu"), torch.zeros(3, dtype=torch.int32)
    for tile, by_rows in ((16, True), (64, True), (128, True), (128, False)):
        if only in (0, tile):
            # Rows of 2048 and LoRA's 16 features; the last step is not a whole one.
            matrices = bf16(2, 1536, 2064).transpose(1, 2) if by_rows else bf16(2, 2064, 1536)
            matmul: Any = SimpleNamespace(tile=tile, cut=grouped_mm.default(tile, cpu))
            rows = tiled(offsets, 16, tile)
            grouped_mm.KERNEL.launch(bf16(16, 2064), matmul, matrices, rows, (0, 1536))
            yield f"grouped, {tile} rows, {'by rows' if by_rows else 'by columns'}"
    tokens, products, matrices = bf16(512, 2048), bf16(4096 * 16), bf16(2, 2064, 1536)
    matmul = SimpleNamespace(tile=128, cut=grouped_mm.default(128, cpu))
    grouped_mm.KERNEL.launch(tokens, matmul, matrices, routed(4096, 2, 8), (0, 1536), products)
    yield "grouped, 128 rows, fetched from tokens"


def hopper_launches() -> Iterator[str]:
    """The kernels for Hopper: both directions, dtypes and kinds, tiles, and the fewest steps."""
    # Every two of: the matrix, the direction, LoRA or none, the dtype and kind, rows in order or
    # fetched from tokens.
    for rows, cols, back, rank, kind, fetches in [
        (128, 320, False, 0, "nf4", False),
        (128, 320, True, 16, "fp4", True),
        (192, 128, False, 16, "nf4", True),
        (192, 128, True, 0, "nf4", False),
        (128, 128, False, 16, "fp4", False),
        (128, 128, True, 0, "nf4", True),
        (128, 320, False, 16, "mxfp4", True),
        (192, 128, True, 0, "mxfp4", False),
    ]:
        tile = 64 if rows == 192 else 128
        multiply(quantized_mm_hopper.KERNEL, rows, cols, back, rank, kind, fetches, tile)
        yield f"hopper {kind}, {rows} x {cols}, {tile} rows, {'back' if back else 'out'}"
    # Weights in registers: out alone, and sums over whole groups of 256.
    for rows, cols, rank, kind in [(128, 512, 16, "nf4"), (192, 1024, 0, "fp4")]:
        multiply(quantized_mm_rs.KERNEL, rows, cols, False, rank, kind, rank > 0, 256)
        yield f"hopper {kind}, {rows} x {cols}, in registers"
    narrow = stack_of((2, 128, 64), "nf4", False, torch.bfloat16)
    assert not quantized_mm_hopper.KERNEL.supports(Matmul(narrow, torch.bfloat16, 400, True))


def multiply(
    kernel: Any, rows: int, cols: int, back: bool, rank: int, kind: str, fetches: bool, tile: int
) -> None:
    """Compute a product of 16 rows by a kernel, which is for such products of 400."""
    made = partial(torch.empty, dtype=torch.float16 if kind == "fp4" else torch.bfloat16)
    inner, out = (rows, cols) if back else (cols, rows)
    x = made(8, inner) if fetches else made(16, inner + rank)
    stack, factors, cut = stack_of((2, rows, cols), kind, False, torch.bfloat16), None, None
    if rank:
        factor = made(2, out, rank)
        factors = Factors(factor[..., :0].transpose(1, 2), factor, 1.0)
    if kernel is quantized_mm.KERNEL:
        cut = kernel.cut(Matmul(stack, x.dtype, 16, not back), tile)
    more = {"factors": factors, "kernel": kernel, "tile": tile, "cut": cut}
    matmul = Matmul(stack, x.dtype, 400, not back, **more)
    assert kernel.supports(matmul), matmul
    order = torch.zeros(16, dtype=torch.int32)
    products = made(16 * rank) if fetches else None
    sorted_rows = tiled(order[:3], 16, tile, order, 2)
    kernel.launch(x, matmul, stack.absmax, sorted_rows, (0, out), products)


def layer_launches(target: int) -> Iterator[str]:
    """Launch whole layers, in which each target compiles every kernel, in mixes of its own."""
    gates, x = gate_kernels.Gate, bf16(64, 2048)
    clamped = gates("silu", interleaved=True, limit=7.0, alpha=1.7, shift=1.0)

    def layer_of(
        gate: Any, kind: str, nested: bool, transposed: bool, biased: bool, rank: int,
        tokens: int, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        ranks, kinds = (rank, rank), (kind, nested)
        case = Case(tokens, 2, 2, 128, 64, gate, transposed, biased, ranks, kinds, None, dtype)
        layer, _, x, weights, index, biases, lora = build(case)
        with torch.no_grad():
            operands = moe_layer.Operands(x, weights, biases, lora)
            state = moe_layer.gate_up_forward(layer, index, operands)
            moe_layer.down_forward(layer, state)
            moe_layer.backward(layer, state.routing, state.saved, x, operands)

    def gate_of(size: int, rank: int, count: int, biased: bool, ordered: bool) -> None:
        out, bias = x[:, : size + rank], x if biased else None
        gate_kernels.apply_gate(
            clamped, x, bias, routed(count, 4, 2), out, x, rank, 1.0, x, ordered=ordered
        )

    if target == 80:
        layer_of(gates("gelu"), "nf4", True, False, False, 16, 64)
        workspace.set_workspace_cap(1)
        layer_of(clamped, "fp4", False, True, True, 4, 1024)
        workspace.set_workspace_cap(None)
        layer_of(gates("relu2", gated=False), "int8", False, False, True, 0, 16)
        layer_of(gates("silu"), "nf4", True, False, False, 128, 16)
    else:
        layer_of(clamped, "fp4", False, True, True, 4, 180, torch.float16)
        layer_of(gates("gelu_tanh"), "int8", False, True, False, 8, 16)
        layer_of(clamped, "mxfp4", True, False, True, 16, 64)
        for rank in (0, 128):
            gate_of(512, rank, 1024, False, True)
        workspace.set_workspace_cap(1)
        layer_of(gates("relu"), "nf4", True, False, False, 16, 1024)
        quantized_mm_rs.reorder(x)
        for rank in (16, 128):
            multiply_tokens(x, routed(1024, 4, 2), x, rank, False, 1.0, x, None, None)
        for rank in (0, 32):  # tiles of 16 rows
            multiply_tokens(x, routed(16, 4, 2), x, rank, True, 1.0, x, x, x)
            gate_of(768, rank, 16, True, False)
    yield "layers"


if __name__ == "__main__":
    main(*sys.argv[1:])
