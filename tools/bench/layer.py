"""One layer of experts, ours and its peers in one process; appends to results/layer.csv.

    python tools/bench/layer.py                         qwen3-30b-a3b, 4096 and 16384 tokens
    python tools/bench/layer.py --shape mixtral-8x7b --tokens 16,256,4096
    python tools/bench/layer.py --shape qwen2_moe       any model type, at its default size
    python tools/bench/layer.py --tiny --device cpu     whether it runs at all

Random weights, uniform routing, bf16 activations. "step" is forward and backward to the input, the
routing weights and the adapters; "checkpointed" runs the layer under non-reentrant checkpointing.
A bar is the median over the repetitions, timed by events on the device.

    ours        packed nf4 with double quantization, LoRA of both projections
    frozen      bf16 weights, no LoRA, transformers' grouped_mm
    peft        bf16 weights, PEFT's LoRA of both projections, transformers' grouped_mm
    bnb         packed by bitsandbytes' parametrization, no LoRA, transformers' grouped_mm
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Rows, environment
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_qlora

FLOPS, BYTES = 790e12, 4.3e12  # of an H200, measured: bf16 products, and a device copy

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", {"hidden_size": 2048, "moe_intermediate_size": 768,
                                    "num_experts": 128, "num_experts_per_tok": 8}),
    "mixtral-8x7b": ("mixtral", {"hidden_size": 4096, "intermediate_size": 14336,
                                 "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss-20b": ("gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880,
                                "num_local_experts": 32, "num_experts_per_tok": 4}),
    "glm-4.5-air": ("glm4_moe", {"hidden_size": 4096, "moe_intermediate_size": 1408,
                                 "n_routed_experts": 128, "num_experts_per_tok": 8}),
    "deepseek-v3": ("deepseek_v3", {"hidden_size": 7168, "moe_intermediate_size": 2048,
                                    "n_routed_experts": 256, "num_experts_per_tok": 8}),
}  # fmt: skip
TINY = ("qwen3_moe", {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
                      "num_experts_per_tok": 2})  # fmt: skip


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    where = environment(device, options.commit)
    for tokens in options.tokens:
        for peer in options.peers:
            cap = "" if options.cap is None else f" cap={options.cap}"
            setting = f"tokens={tokens} r={options.rank} peer={peer} nf4+double bf16{cap}"
            rows = Rows(options.out, where, options.shape, setting)
            try:
                measure(peer, options, tokens, device, rows)
            except (RuntimeError, ValueError, ImportError, AttributeError) as error:
                if peer == "ours":
                    raise
                print(f"{options.shape} {tokens} {peer}: {type(error).__name__}: {error}"[:300])
            _release(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a name here, or a model type")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--peers", default="ours,frozen,peft,bnb")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--cap", type=int, default=None, help="bytes of scratch, for ours")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    options = parser.parse_args()
    options.tokens = [32] if options.tiny else [int(n) for n in options.tokens.split(",")]
    options.peers = options.peers.split(",")
    return options


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, int]:
    """A module that holds one experts module, as `experts`, random in bf16; and k."""
    from transformers import AutoConfig, AutoModelForCausalLM

    named = TINY if options.tiny else SHAPES.get(options.shape, (options.shape, {}))
    model_type, sizes = named
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, vocab_size=64, **sizes)
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
    top_k = next(int(getattr(config, name)) for name in choices if hasattr(config, name))
    return holder, top_k


def prepare(peer: str, options: argparse.Namespace, holder: Any) -> list[Tensor]:
    """Make the module what the peer runs; gives the adapters' weights."""
    holder.experts.config._experts_implementation = "grouped_mm"
    if peer == "ours":
        return _ours(options, holder)
    if peer == "bnb":
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(holder.experts, name, compress_statistics=True, quant_type="nf4")
    if peer == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules=[], target_parameters=names
        )
        inject_adapter_in_model(config, holder)
        holder.bfloat16()
    return [p for p in holder.parameters() if p.requires_grad]


def _ours(options: argparse.Namespace, holder: Any) -> list[Tensor]:
    from moe_qlora import codec, experts, storage
    from moe_qlora.codec_settings import CodecSettings

    module = holder.experts
    count = module.num_experts
    terms: dict[str, tuple[experts.LoraTerm, ...]] = {}
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name)
        out, inp = (2, 1) if module.is_transposed else (1, 2)
        shape = weight.shape
        packed = codec.pack(weight.data, CodecSettings("nf4", True, torch.uint8))
        storage.attach(module, name, packed)
        device = packed.device
        a = torch.randn(count * options.rank, shape[inp], device=device) * shape[inp] ** -0.5
        b = torch.randn(shape[out], options.rank * count, device=device) * 0.01
        a, b = a.bfloat16(), b.bfloat16()
        terms[name] = (experts.LoraTerm(a.requires_grad_(), b.requires_grad_(), 2.0),)
    experts.activate(holder, ["experts"])

    class Provider:
        def terms(self, parameter_name: str) -> tuple[experts.LoraTerm, ...]:
            return terms[parameter_name]

    experts.set_lora_provider(module, Provider())
    if options.cap is not None:
        from moe_qlora.kernels import scratch

        scratch.set_scratch_cap(options.cap)
    return [t for both in terms.values() for term in both for t in (term.a, term.b)]


def measure(
    peer: str, options: argparse.Namespace, tokens: int, device: torch.device, rows: Rows
) -> None:
    """Times, kept bytes and peak of one peer."""
    torch.manual_seed(0)
    _forget_scratch()
    holder, top_k = build(options, device)
    first = holder.experts.gate_up_proj if holder.experts.has_gate else holder.experts.up_proj
    count, weights = len(first), first.numel() + holder.experts.down_proj.numel()
    del first
    hidden = holder.experts.down_proj.shape[2 if holder.experts.is_transposed else 1]
    adapters = prepare(peer, options, holder)
    _release(device)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(tokens, count, device=device).topk(top_k, -1).indices
    routing = torch.rand(tokens, top_k, device=device).softmax(-1).bfloat16().requires_grad_()
    grad = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    leaves = [x, routing, *adapters]

    def forward() -> Tensor:
        out: Tensor = holder.experts(x, index, routing)
        return out

    def step() -> None:
        torch.autograd.grad(forward(), leaves, grad)

    def checkpointed() -> None:
        out = checkpoint(holder.experts, x, index, routing, use_reentrant=False)
        torch.autograd.grad(out, leaves, grad)

    with torch.no_grad():
        rows.add("forward", "ms", *_times(forward, device, options.repeat))
    if device.type == "cuda":
        step()
        _release(device)
        _memory(forward, leaves, grad, device, rows)
    rows.add("step", "ms", *(times := _times(step, device, options.repeat)))
    rows.add("step, checkpointed", "ms", *_times(checkpointed, device, options.repeat))
    flops = 4 * tokens * top_k * weights / count
    moved = 2 * (weights * 0.516 + 4 * x.nbytes + 2 * tokens * top_k * weights / count / hidden)
    median = sorted(times)[len(times) // 2]
    rows.add("step over FLOP floor", "x", median / (flops / FLOPS * 1e3))
    rows.add("step over byte floor", "x", median / (moved / BYTES * 1e3))


def _memory(
    forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, device: torch.device,
    rows: Rows,
) -> None:  # fmt: skip
    """Bytes alive between forward and backward, and the peak, scratch included, over before."""
    before = torch.cuda.memory_allocated(device) - held_now()
    out = forward()
    rows.add("kept", "MiB", (torch.cuda.memory_allocated(device) - before - held_now()) / 2**20)
    torch.autograd.grad(out, leaves, grad)
    rows.add("peak", "MiB", (torch.cuda.max_memory_allocated(device) - before) / 2**20)


def _forget_scratch() -> None:
    try:
        from moe_qlora.kernels import scratch
    except ImportError:
        return
    scratch.release_scratch()


def held_now() -> int:
    """Bytes of this package's shared scratch."""
    try:
        from moe_qlora.kernels import scratch
    except ImportError:
        return 0
    return scratch.held_bytes()


def _times(run: Callable[[], Any], device: torch.device, repeat: int) -> list[float]:
    for _ in range(3):
        run()
    if device.type == "cuda":
        return event_times(run, repeat)
    taken = []
    for _ in range(repeat):
        before = time.perf_counter()
        run()
        taken.append((time.perf_counter() - before) * 1e3)
    return taken


def event_times(run: Callable[[], Any], repeat: int) -> list[float]:
    """Milliseconds of calls one behind the other, as a model's layers are, after two more.

    The host's own time shows where it is the longer.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks[2:])]


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
