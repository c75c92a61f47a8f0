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
from contextlib import nullcontext
from typing import Any

import peft
import torch
from common import (
    FLOPS,
    Rows,
    environment,
    parser_of,
    release,
    times,
    words_of,
)
from shapes import meta_model, quantization, random_mxfp4, whole_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_qlora
from moe_qlora.kernels import cards, workspace
from moe_qlora.packing import parametrize
from moe_qlora.testing import fill_randomly

PEERS = ("ours", "frozen", "peft")
OURS = ("ours", "mxfp4", "portable")
KNOWN = (*PEERS, *OURS[1:])


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


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, str, int]:
    """A model of few layers, random in bf16; the name of its first experts module; and k."""
    config = whole_config(options.shape, layers=4, tiny=options.tiny)
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = 64, None
    model: Any = fill_randomly(meta_model(config), device).requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    name = next(m.name for m in moe_qlora.detect(model).modules if m.dispatches)
    choices = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    return model, name, next(int(getattr(text, one)) for one in choices if hasattr(text, one))


def prepare(peer: str, options: argparse.Namespace, model: Any, name: str) -> tuple[Any, Any]:
    """Turn the model into the peer's; returns its experts, and the adapters' weights."""
    if peer == "mxfp4":
        for module, leaf in [(p.module_name, p.parameter_name) for p in moe_qlora.detect(model)]:
            owner = model.get_submodule(module)
            weight = getattr(owner, leaf)
            packed = random_mxfp4(weight.shape, bool(owner.is_transposed), weight.device)
            parametrize.attach(owner, leaf, packed)
    if peer in OURS:
        moe_qlora.quantize_experts(model, quantization())
    if peer == "frozen":
        return model.get_submodule(name), []
    names = [p.name for p in moe_qlora.detect(model) if p.module_name == name]
    sizes: Any = {"r": options.rank, "lora_alpha": 2 * options.rank}
    config = peft.LoraConfig(target_modules=[], target_parameters=names, **sizes)
    get: Any = moe_qlora.get_peft_model if peer in OURS else peft.get_peft_model
    model = get(model, config, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    return model.get_submodule(f"base_model.model.{name}"), trained


def measure(
    peer: str, options: argparse.Namespace, tokens: int, device: torch.device, rows: Rows
) -> None:
    """Times, kept bytes, peak and ratios to the floors of one peer."""
    torch.manual_seed(0)
    model, name, top_k = build(options, device)
    experts = model.get_submodule(name)
    stacks = [weight for weight in experts.parameters() if weight.dim() == 3]
    count, weights = len(stacks[0]), sum(weight.numel() for weight in stacks)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    del stacks
    with cards.acting_as(cards.PORTABLE) if peer == "portable" else nullcontext():
        experts, adapters = prepare(peer, options, model, name)
        release(device)
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        index = torch.rand(tokens, count, device=device).topk(top_k, -1).indices
        routing = torch.rand(tokens, top_k, device=device).softmax(-1).bfloat16().requires_grad_()
        grad = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)

        def forward() -> Tensor:
            out: Tensor = experts(x, index, routing)
            return out

        leaves = [x, routing, *adapters]

        def step() -> None:
            torch.autograd.grad(forward(), leaves, grad)

        def checkpointed() -> None:
            out = checkpoint(experts, x, index, routing, use_reentrant=False)
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
