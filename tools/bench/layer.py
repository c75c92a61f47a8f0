"""One layer of experts, ours and its peers in one process; appends to results/layer.csv.

    python tools/bench/layer.py                         qwen3-30b-a3b, 4096 and 16384 tokens
    python tools/bench/layer.py --shape mixtral-8x7b --tokens 16,256,4096
    python tools/bench/layer.py --shape qwen2_moe       any model type, at its default size
    python tools/bench/layer.py --shape gpt-oss-20b --peers ours,mxfp4    on kept MXFP4 codes too
    python tools/bench/layer.py --peers ours,portable    as on other cards, too
    python tools/bench/layer.py --peers ours,projection,loop,bnb    what falling back costs
    python tools/bench/layer.py --part gate_up          the first projection's forward alone
    python tools/bench/layer.py --tiny --device cpu     whether it runs at all

Random weights, uniform routing, bf16 activations. "step" is forward and backward to the input, the
routing weights and the adapters; "checkpointed" runs the layer under non-reentrant checkpointing.
The peers are those of peers.py; a bar is the median over the repetitions, timed by events on the
device. The floors count a step's products without LoRA's, and the bytes of codes (of the experts
that have rows), rows and tokens, each moved once in either direction.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import gate_up
import torch
from common import (
    BYTES,
    FLOPS,
    RESULTS,
    Rows,
    allocated,
    environment,
    release,
    release_workspace,
    scratch_bytes,
    times,
)
from peers import OURS, PEERS, UnavailableError, build, prepare, versions
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    where = environment(device, options.commit)
    part = "" if options.part == "layer" else f" part={options.part}"
    run = measure if options.part == "layer" else gate_up.measure
    name = "tiny" if options.tiny else options.shape
    for tokens in options.tokens:
        for peer in options.peers:
            cap = "" if options.cap is None else f" cap={options.cap}"
            words = f"tokens={tokens} r={options.rank} peer={peer}"
            print(f"\n{name} {words}{part}", flush=True)
            release_workspace()
            try:
                packed = "mxfp4" if peer == "mxfp4" else "nf4+double"
                setting = f"{words}{part} {packed} bf16{cap}{versions(peer)}"
                rows = Rows(options.out, where, name, setting)
                run(peer, options, tokens, device, rows)
            except UnavailableError as error:
                print(f"skipped: {error}")
            except Exception as error:
                if peer in OURS:
                    raise
                rows.fail(error)
            release(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a name in shapes.py, or a type")
    parser.add_argument("--part", choices=["layer", "gate_up"], default="layer")
    parser.add_argument("--tokens", help="default: 4096,16384; of gate_up 16,64,256,1024")
    parser.add_argument("--peers", help=f"default: {','.join(PEERS)}; of gate_up: see gate_up.py")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--cap", type=int, default=None, help="bytes of scratch, for ours")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    options = parser.parse_args()
    whole = options.part == "layer"
    options.tokens = options.tokens or ("4096,16384" if whole else "16,64,256,1024")
    options.tokens = [32] if options.tiny else [int(n) for n in options.tokens.split(",")]
    known = PEERS if whole else gate_up.PEERS
    options.peers = options.peers.split(",") if options.peers else list(known)
    unknown = set(options.peers) - {*known, *(OURS if whole else [])}
    if unknown:
        parser.error(f"--peers {', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    return options


def measure(
    peer: str, options: argparse.Namespace, tokens: int, device: torch.device, rows: Rows
) -> None:
    """Times, kept bytes, peak and ratios to the floors of one peer."""
    torch.manual_seed(0)
    before = allocated(device)
    holder, top_k = build(options, device)
    first = holder.experts.gate_up_proj if holder.experts.has_gate else holder.experts.up_proj
    count, weights = len(first), first.numel() + holder.experts.down_proj.numel()
    del first
    hidden = holder.experts.down_proj.shape[2 if holder.experts.is_transposed else 1]
    with ExitStack() as stack:
        adapters = prepare(peer, options, holder, stack)
        release(device)
        if device.type == "cuda":
            rows.add("weights and adapters", "MiB", (allocated(device) - before) / 2**20)
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        index = torch.rand(tokens, count, device=device).topk(top_k, -1).indices
        routing = torch.rand(tokens, top_k, device=device).softmax(-1).bfloat16().requires_grad_()
        grad = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)

        def forward() -> Tensor:
            out: Tensor = holder.experts(x, index, routing)
            return out

        leaves = _leaves(forward(), [x, routing], adapters, grad)

        def step() -> None:
            torch.autograd.grad(forward(), leaves, grad)

        def checkpointed() -> None:
            out = checkpoint(holder.experts, x, index, routing, use_reentrant=False)
            torch.autograd.grad(out, leaves, grad)

        with torch.no_grad():
            rows.add("forward", "ms", *times(forward, device, options.repeat))
        if device.type == "cuda":
            step()
            release(device)
            _memory(forward, leaves, grad, device, rows)
        each = weights / count
        active = index.unique().numel()
        flops = 2 * tokens * top_k * each / FLOPS * 1e3
        moved = each * active * 0.516 + 4 * x.nbytes + 2 * tokens * top_k * each / hidden
        # Forward and backward to the input; once more forward where that is computed again.
        for name, run, passes in (("step", step, 2), ("step, checkpointed", checkpointed, 3)):
            taken = times(run, device, options.repeat)
            rows.add(name, "ms", *taken)
            rows.add(f"{name} over FLOP floor", "x", *(ms / (passes * flops) for ms in taken))
            floor = passes * moved / BYTES * 1e3
            rows.add(f"{name} over byte floor", "x", *(ms / floor for ms in taken))


def _leaves(
    out: Tensor, inputs: list[Tensor], adapters: list[Tensor], grad: Tensor
) -> list[Tensor]:
    """What gradients are asked for: a peer may leave out the routing weights', and says so.

    Raises:
        RuntimeError: It leaves out another.
    """
    leaves = [*inputs, *adapters]
    found: Sequence[Tensor | None] = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    if found[0] is None or any(gradient is None for gradient in found[2:]):
        raise RuntimeError("no gradient of the input, or of an adapter")
    if found[1] is None:
        print("without the gradient of the routing weights")
        return [inputs[0], *adapters]
    return leaves


def _memory(
    forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, device: torch.device,
    rows: Rows,
) -> None:  # fmt: skip
    """Bytes alive between forward and backward, and the peak, scratch included, over before."""
    before = torch.cuda.memory_allocated(device) - scratch_bytes()
    out = forward()
    kept = torch.cuda.memory_allocated(device) - before - scratch_bytes()
    rows.add("kept", "MiB", kept / 2**20)
    torch.autograd.grad(out, leaves, grad)
    rows.add("peak", "MiB", (torch.cuda.max_memory_allocated(device) - before) / 2**20)


if __name__ == "__main__":
    main()
