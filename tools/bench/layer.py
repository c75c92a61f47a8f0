"""One layer of experts, ours and its peers in one process; appends to results/layer.csv.

    python tools/bench/layer.py                         qwen3-30b-a3b, 4096 and 16384 tokens
    python tools/bench/layer.py --shape qwen2_moe       any model type, at its default size
    python tools/bench/layer.py --peers ours --tokens 16,256,4096

    ours        packed nf4 with double quantization, LoRA of both projections
    frozen      bf16 weights, no LoRA, transformers' grouped_mm
    peft        bf16 weights, PEFT's LoRA of both projections, transformers' grouped_mm

Random weights, uniform routing, bf16 activations. "step" is forward and backward to the input, the
routing weights and the adapters; "checkpointed" runs the layer under non-reentrant checkpointing.
The floor counts a step's products without LoRA's.
"""

import argparse
from collections.abc import Callable
from typing import Any

import peft
import torch
from common import FLOPS, Rows, parser_of, peak, release, times, words
from model import build as build_whole
from shapes import quantization, whole_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_qlora
from moe_qlora.kernels import workspace

PEERS = ("ours", "frozen", "peft")


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = parser_of(__doc__, "layer.csv")
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="as `moe-qlora plan` takes it")
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--peers", type=words(*PEERS), default=",".join(PEERS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    for tokens in [32] if options.tiny else map(int, options.tokens.split(",")):
        for peer in options.peers:
            setting = f"tokens={tokens} r={options.rank} peer={peer} nf4+double bf16"
            rows = Rows(options, "tiny" if options.tiny else options.shape, setting)
            release(options.device, workspace=True)
            with rows.attempt(peer == "ours"):
                measure(peer, options, tokens, rows)


def build(options: argparse.Namespace) -> tuple[Any, str, int]:
    """A model of few layers, random in bf16; the name of its first experts module; and k."""
    config = whole_config(options.shape, layers=4, tiny=options.tiny)
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = 64, None
    model: Any = build_whole(config, options.device, packed=False)[0].requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    name = next(m.name for m in moe_qlora.detect(model).modules if m.dispatches)
    choices = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    return model, name, next(int(getattr(text, one)) for one in choices if hasattr(text, one))


def prepare(peer: str, options: argparse.Namespace, model: Any, name: str) -> tuple[Any, Any]:
    """Turn the model into the peer's; returns its experts, and the adapters' weights."""
    if peer == "ours":
        moe_qlora.quantize_experts(model, quantization())
    if peer == "frozen":
        return model.get_submodule(name), []
    names = [p.name for p in moe_qlora.detect(model) if p.module_name == name]
    sizes: Any = {"r": options.rank, "lora_alpha": 2 * options.rank}
    config = peft.LoraConfig(target_modules=[], target_parameters=names, **sizes)
    get: Any = moe_qlora.get_peft_model if peer == "ours" else peft.get_peft_model
    model = get(model, config, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()
    return model.get_submodule(f"base_model.model.{name}"), trained


def measure(peer: str, options: argparse.Namespace, tokens: int, rows: Rows) -> None:
    """Times, kept bytes, peak and ratios to the floors of one peer."""
    torch.manual_seed(0)
    device: torch.device = options.device
    model, name, top_k = build(options)
    experts = model.get_submodule(name)
    shapes = [weight.shape for weight in experts.parameters() if weight.dim() == 3]
    count, weights = shapes[0][0], sum(shape.numel() for shape in shapes)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    experts, adapters = prepare(peer, options, model, name)
    release(device)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(tokens, count, device=device).topk(top_k, -1).indices
    routing = torch.rand(tokens, top_k, device=device).softmax(-1).bfloat16().requires_grad_()
    grad, leaves = torch.randn_like(x), [x, routing, *adapters]

    def forward() -> Tensor:
        out: Tensor = experts(x, index, routing)
        return out

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
        memory(forward, leaves, grad, rows)
    flops = 2 * tokens * top_k * weights / count / FLOPS * 1e3
    # Forward and backward to the input; once more forward where that is computed again.
    for name, run, passes in (("step", step, 2), ("step, checkpointed", checkpointed, 3)):
        taken = times(run, device, options.repeat)
        rows.add(name, "ms", *taken)
        rows.add(f"{name} over FLOP floor", "x", *(ms / (passes * flops) for ms in taken))


def memory(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, rows: Rows) -> None:
    """Bytes alive between forward and backward, and the peak, scratch included, over before."""

    def held() -> int:
        scratch = sum(b.nbytes for b in workspace.buffers(grad.device))
        return torch.cuda.memory_allocated(grad.device) - scratch

    before = held()
    out = forward()
    rows.add("kept", "MiB", (held() - before) / 2**20)
    torch.autograd.grad(out, leaves, grad)
    rows.add("peak", "MiB", (peak(grad.device) - before) / 2**20)


if __name__ == "__main__":
    main()
