"""One layer of experts, ours and its peers in one process; appends to results/layer.csv.

    python tools/bench/layer.py                         qwen3-30b-a3b, 4096 and 16384 tokens
    python tools/bench/layer.py --shape mixtral-8x7b --tokens 16,256,4096
    python tools/bench/layer.py --shape qwen2_moe       any model type, at its default size
    python tools/bench/layer.py --peers ours,mxfp4,portable
    python tools/bench/layer.py --tiny --device cpu     whether it runs at all

    ours        packed nf4 with double quantization, LoRA of both projections
    mxfp4       ours, on random MXFP4 codes as a checkpoint's are kept; only where asked for
    portable    ours, as on a card of compute capability 8.6; only where asked for
    frozen      bf16 weights, no LoRA, transformers' grouped_mm
    peft        bf16 weights, PEFT's LoRA of both projections, transformers' grouped_mm

Random weights, uniform routing, bf16 activations. "step" is forward and backward to the input, the
routing weights and the adapters; "checkpointed" runs the layer under non-reentrant checkpointing.
Times are by events on the device. The floor counts a step's products without LoRA's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from common import (
    FLOPS,
    Rows,
    allocated,
    environment,
    parser_of,
    release,
    times,
    words_of,
)
from shapes import random_mxfp4, whole_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_qlora
from moe_qlora.experts import forward as forward_
from moe_qlora.experts import operands
from moe_qlora.kernels import cards, workspace
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings

PEERS = ("ours", "frozen", "peft")
OURS = ("ours", "mxfp4", "portable")
KNOWN = (*PEERS, *OURS[1:])
PROJECTIONS = ("gate_up_proj", "down_proj")


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    where = environment(device, options.commit)
    name = "tiny" if options.tiny else options.shape
    for tokens in options.tokens:
        for peer in options.peers:
            words = f"tokens={tokens} r={options.rank} peer={peer}"
            print(f"\n{name} {words}", flush=True)
            workspace.release_workspace()
            packed = "mxfp4" if peer == "mxfp4" else "nf4+double"
            rows = Rows(options.out, where, name, f"{words} {packed} bf16")
            try:
                measure(peer, options, tokens, device, rows)
            except Exception as error:
                if peer in OURS:
                    raise
                rows.fail(error)
            release(device)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "layer.csv")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="as `moe-qlora plan` takes it")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    options.tokens = [32] if options.tiny else [int(n) for n in options.tokens.split(",")]
    options.peers = words_of(parser, "--peers", options.peers, KNOWN)
    return options


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, int]:
    """A module that holds one experts module, as `experts`, random in bf16; and k."""
    from transformers import AutoModelForCausalLM

    config = whole_config(options.shape, layers=4, tiny=options.tiny)
    text = config.get_text_config()
    text.vocab_size = 64
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = next(m for m in moe_qlora.detect(model).modules if m.dispatches)
    holder: Any = nn.Module()
    holder.experts = model.get_submodule(found.name).to_empty(device=device)
    holder.config = holder.experts.config
    with torch.no_grad():
        for parameter in holder.experts.parameters():
            parameter.normal_(std=0.02)
    holder.requires_grad_(False)
    choices = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    top_k = next(int(getattr(text, name)) for name in choices if hasattr(text, name))
    return holder, top_k


def prepare(peer: str, options: argparse.Namespace, holder: Any, stack: ExitStack) -> list[Tensor]:
    """Turn the module into the peer's, until `stack` closes; returns the adapters' weights."""
    holder.experts.config._experts_implementation = "grouped_mm"
    if peer == "portable":
        stack.enter_context(cards.acting_as(cards.PORTABLE))
    if peer in OURS:
        return _ours(peer, options, holder)
    if peer == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        names = [f"experts.{name}" for name in PROJECTIONS]
        config = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules=[], target_parameters=names
        )
        inject_adapter_in_model(config, holder)
    trained = [parameter for parameter in holder.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    return trained


def _ours(peer: str, options: argparse.Namespace, holder: Any) -> list[Tensor]:
    module = holder.experts
    count = module.num_experts
    terms: dict[str, tuple[operands.LoraFactors, ...]] = {}
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name)
        out, inp = (2, 1) if module.is_transposed else (1, 2)
        shape = weight.shape
        if peer == "mxfp4":
            packed = random_mxfp4(shape, bool(module.is_transposed), weight.device)
        else:
            packed = codec.pack(weight.data, CodecSettings("nf4", True, torch.uint8))
        parametrize.attach(module, name, packed)
        device = packed.device
        a = torch.randn(count * options.rank, shape[inp], device=device) * shape[inp] ** -0.5
        b = torch.randn(shape[out], options.rank * count, device=device) * 0.01
        a, b = a.bfloat16(), b.bfloat16()
        terms[name] = (operands.LoraFactors(a.requires_grad_(), b.requires_grad_(), 2.0),)
    forward_.activate(holder, ["experts"])
    source: Any = SimpleNamespace(active_lora=terms.__getitem__)
    operands.set_lora_source(module, source)
    return [t for both in terms.values() for term in both for t in (term.a, term.b)]


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

        leaves = [x, routing, *adapters]

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
        flops = 2 * tokens * top_k * each / FLOPS * 1e3
        # Forward and backward to the input; once more forward where that is computed again.
        for name, run, passes in (("step", step, 2), ("step, checkpointed", checkpointed, 3)):
            taken = times(run, device, options.repeat)
            rows.add(name, "ms", *taken)
            rows.add(f"{name} over FLOP floor", "x", *(ms / (passes * flops) for ms in taken))


def _memory(
    forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, device: torch.device,
    rows: Rows,
) -> None:  # fmt: skip
    """Bytes alive between forward and backward, and the peak, scratch included, over before."""

    def held() -> int:
        scratch = sum(b.nbytes for b in workspace.buffers(device))
        return torch.cuda.memory_allocated(device) - scratch

    before = held()
    out = forward()
    kept = held() - before
    rows.add("kept", "MiB", kept / 2**20)
    torch.autograd.grad(out, leaves, grad)
    rows.add("peak", "MiB", (torch.cuda.max_memory_allocated(device) - before) / 2**20)


if __name__ == "__main__":
    main()
