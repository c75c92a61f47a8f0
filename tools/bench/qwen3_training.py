"""Packs and trains a Qwen3-30B-A3B configuration with random weights; appends to results/model.csv.

    python tools/bench/qwen3_training.py                       one GPU with 80 GB or more
    python tools/bench/qwen3_training.py --lora experts,attention --batch 4
    python tools/bench/qwen3_training.py --bf16        experts left in bf16: the baseline
    python tools/bench/qwen3_training.py --liger       Liger's chunked cross-entropy
    python tools/bench/qwen3_training.py --tiny --device cpu   whether it runs at all

The model is built in bf16 on the device, so that packing is what happens after a stock load. Its
Linear layers stay in bf16: only the experts, 95 % of its weights, are packed.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Rows, environment

import moe_qlora

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA_RATE = 1e-4


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    setting = (
        f"layers={options.layers} lora={options.lora} r={options.rank} seq={options.seq} "
        f"batch={options.batch} "
        f"checkpointing={'none' if options.no_checkpointing else 'non-reentrant'} "
        f"{'bf16' if options.bf16 else 'nf4+double'}{' liger' if options.liger else ''}"
    )
    name = "qwen3_moe-tiny" if options.tiny else "qwen3-30b-a3b"
    rows = Rows(options.out, environment(device, options.commit), name, setting)
    model = build(options, device)
    if options.bf16:
        model.set_experts_implementation("grouped_mm")
    else:
        pack(model, device, rows)
    peft_model = adapt(model, options)
    record_kept(peft_model, options, rows)
    train(peft_model, options, device, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=None, help="default: 48, or 2 with --tiny")
    parser.add_argument("--lora", default="attention", help="attention, experts or both by comma")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 64 with --tiny")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="leave the experts in bf16")
    parser.add_argument("--liger", action="store_true", help="Liger's chunked cross-entropy")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "model.csv")
    parser.add_argument("--commit", help="for a copy of the tree without its history")
    options = parser.parse_args()
    options.layers = options.layers or (2 if options.tiny else 48)
    options.seq = options.seq or (64 if options.tiny else 4096)
    if not set(options.lora.split(",")) <= {"attention", "experts"}:
        parser.error(f"--lora {options.lora}: expected attention, experts or attention,experts")
    return options


def build(options: argparse.Namespace, device: torch.device) -> Any:
    """The model in bf16 on the device, with transformers' own random initialization."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    if options.tiny:
        sizes |= {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        sizes |= {"moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2}
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(
            rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True
        )
    config = Qwen3MoeConfig(num_hidden_layers=options.layers, **sizes)
    start = time.perf_counter()
    with device:
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    _synchronize(device)
    print(f"built {model.num_parameters():,} weights in {time.perf_counter() - start:.1f} s")
    return model


def pack(model: Any, device: torch.device, rows: Rows) -> None:
    """Pack the experts; records time, bytes and the memory that packing takes beyond the model."""
    from transformers import BitsAndBytesConfig

    weights = sum(param.numel for param in moe_qlora.detect(model))
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    _release(device)
    before = _allocated(device)
    _synchronize(device)
    start = time.perf_counter()
    report = moe_qlora.quantize_experts(model, config)
    _synchronize(device)
    seconds = time.perf_counter() - start
    rows.add("experts before", "bytes", report.bytes_before)
    rows.add("experts packed", "bytes", report.bytes_after)
    rows.add("packed weight", "bytes/weight", report.bytes_after / weights)
    rows.add("packing time", "s", seconds)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        rows.add("16-bit model", "bytes", before)
        rows.add("peak while packing over model", "bytes", peak - before)
        _release(device)
        rows.add("packed model", "bytes", _allocated(device))


def adapt(model: Any, options: argparse.Namespace) -> Any:
    """LoRA as asked for, under gradient checkpointing unless told otherwise."""
    from peft import LoraConfig

    if not options.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    wanted = set(options.lora.split(","))
    if options.bf16 and "experts" in wanted:
        raise SystemExit("--bf16 is the baseline: --lora attention")
    targets = moe_qlora.target_parameters(model) if "experts" in wanted else None
    config = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=ATTENTION if "attention" in wanted else [],
        target_parameters=targets,
        task_type="CAUSAL_LM",
    )
    # bf16 adapters, as in the figures that this is compared with; PEFT would cast them to fp32.
    return moe_qlora.get_peft_model(model, config, autocast_adapter_dtype=False)


def train(model: Any, options: argparse.Namespace, device: torch.device, rows: Rows) -> None:
    """Train on random tokens; records each step's time, tokens/s and the peak."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows.add("trained weights", "weights", sum(parameter.numel() for parameter in parameters))
    optimizer = torch.optim.AdamW(parameters, lr=LORA_RATE)
    _release(device)
    seconds: list[float] = []
    losses: list[float] = []
    for ids in _tokens(model.config.vocab_size, options, device):
        _synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not losses:
            _check_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    seconds = seconds[options.warmup :]
    rows.add("step", "s", *seconds)
    rows.add("throughput", "tokens/s", *(options.batch * options.seq / step for step in seconds))
    rows.add("first loss", "nats", losses[0])
    rows.add("last loss", "nats", losses[-1])
    if device.type == "cuda":
        rows.add("peak in training", "bytes", torch.cuda.max_memory_allocated(device))


def record_kept(model: Any, options: argparse.Namespace, rows: Rows) -> None:
    """What one layer keeps between forward and backward, and its own activations, without hooks on.

    Its activations are what its operations give out in bf16: for attention four projections, the
    two norms and the output; for experts the gathered rows, both projections, the activation.
    """
    if not options.no_checkpointing or not torch.cuda.is_available():
        return
    kept: list[int] = []
    starts: list[int] = []
    handles = []
    for layer in model.get_base_model().model.layers:
        enter = layer.register_forward_pre_hook(
            lambda *_: starts.append(torch.cuda.memory_allocated())
        )
        leave = layer.register_forward_hook(
            lambda *_: kept.append(torch.cuda.memory_allocated() - starts[-1])
        )
        handles += [enter, leave]
    ids = torch.zeros(1, options.seq, dtype=torch.long, device="cuda")
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    config = model.config
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 4 * config.hidden_size + 2 * heads * config.head_dim
    routed = config.num_experts_per_tok * (
        2 * config.hidden_size + 4 * config.moe_intermediate_size
    )
    rows.add("kept by a layer", "bytes", *kept)
    rows.add("a layer's own activations", "bytes", 2 * options.seq * (attention + routed))


def _tokens(vocab: int, options: argparse.Namespace, device: torch.device) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.warmup + options.steps):
        yield torch.randint(vocab, (options.batch, options.seq), generator=generator).to(device)


def _check_gradients(model: Any) -> None:
    """Every LoRA B must get a gradient (A gets none while B is zero)."""
    dead = [
        name
        for name, parameter in model.named_parameters()
        if "lora_B" in name and (parameter.grad is None or not parameter.grad.any())
    ]
    if dead:
        raise RuntimeError(f"{len(dead)} LoRA weights get no gradient, the first is {dead[0]}")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
