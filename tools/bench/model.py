"""Trains a whole model with random weights, ours and its peers one after the other; model.csv.

    python tools/bench/model.py                        qwen3-30b-a3b, one GPU with 80 GB or more
    python tools/bench/model.py --prepare 28GiB --optimizer adamw_fused --peers ours
    python tools/bench/model.py --liger-loss --compile --no-checkpointing --peers frozen
    python tools/bench/model.py --tiny --device cpu    whether it runs at all

    ours        experts packed, nf4 with double quantization; LoRA as `--lora` says
    frozen      bf16 experts, transformers' grouped_mm; LoRA on attention alone
    peft        bf16 experts, transformers' grouped_mm; PEFT's LoRA as `--lora` says

Only experts are packed; Linear layers stay in bf16 for every peer. AdamW trains the adapters.
`--liger-loss` and `--compile` (each decoder layer) are the same for every peer. `--prepare` is
`prepare_training` for ours, `--offload` `offload_experts`; peers then keep all activations. A model
is made on the device one module at a time, and an expert stack packed as soon as it is made, so
that models fit that do not in 16 bits.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import peft
import torch
from common import (
    Rows,
    allocated,
    environment,
    parser_of,
    recompute,
    release,
    synchronize,
    words_of,
)
from shapes import meta_model, quantization, whole_config
from torch import nn
from transformers import PreTrainedModel

import moe_qlora
from moe_qlora.kernels.workspace import release_workspace
from moe_qlora.packing import codec, parametrize
from moe_qlora.packing.settings import CodecSettings

PEERS = ("ours", "frozen", "peft")
DEVICE = "device"  # the memory of --prepare without a figure: all that the device has free
KINDS = {"keep": "layers kept", "part": "layers kept in part", "recompute": "layers recomputed"}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": partial(torch.optim.AdamW, fused=True),
}


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    where = environment(device, options.commit)
    config = whole_config(options.model, layers=options.layers, tiny=options.tiny)
    if options.attention:
        config._attn_implementation = options.attention
    name = f"{config.model_type}-tiny" if options.tiny else options.model
    for peer in options.peers:
        setting = _setting(peer, options, config.get_text_config().num_hidden_layers)
        print(f"\n{name} {setting}", flush=True)
        rows = Rows(options.out, where, name, setting)
        torch.manual_seed(0)
        release(device)
        try:
            run(peer, options, config, device, rows)
        except Exception as error:
            if peer == "ours":
                raise
            rows.fail(error)
        release_workspace()
        release(device)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "model.csv")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="as `moe-qlora plan` takes it")
    parser.add_argument("--layers", type=int, default=None, help="default: all")
    parser.add_argument("--seq", type=int, default=None, help="default: 4096, or 64 with --tiny")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora", default="experts,attention", help="experts, attention or both")
    parser.add_argument("--liger-loss", action="store_true", help="Liger's loss alone")
    parser.add_argument("--compile", action="store_true", help="each decoder layer")
    parser.add_argument("--offload", action="store_true", help="offload_experts; ours only")
    parser.add_argument(
        "--prepare", nargs="?", const=DEVICE, metavar="MEMORY",
        help="prepare_training, to bytes, 24GiB or what is free; peers: --liger-loss --compile",
    )  # fmt: skip
    parser.add_argument("--attention", help="as attn_implementation; default: transformers' choice")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    options = parser.parse_args()
    options.seq = options.seq or (64 if options.tiny else 4096)
    options.lora = sorted(words_of(parser, "--lora", options.lora, ("attention", "experts")))[::-1]
    options.peers = words_of(parser, "--peers", options.peers, PEERS)
    if options.prepare is not None:
        options.liger_loss = options.compile = True
        options.checkpointing = False
    return options


def _setting(peer: str, options: argparse.Namespace, layers: int) -> str:
    prepared = options.prepare is not None and peer == "ours"
    asked = {
        "liger-loss": options.liger_loss,
        "offload": options.offload and peer == "ours", "compile": options.compile,
        "graphs": prepared, options.optimizer: options.optimizer != "adamw",
        "expandable-segments": "expandable_segments" in os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }  # fmt: skip
    added = ",".join(name for name, wanted in asked.items() if wanted)
    kept = "fit" if prepared else "non-reentrant" if options.checkpointing else "none"
    lora = "attention" if peer == "frozen" else ",".join(options.lora)
    setting = (
        f"layers={layers} lora={lora} r={options.rank} "
        f"seq={options.seq} batch={options.micro_batch} checkpointing={kept} "
        f"{'nf4+double' if peer == 'ours' else 'bf16'} peer={peer} adapters=bf16"
    )
    memory = options.prepare if prepared and options.prepare != DEVICE else None
    more = {"with": added, "memory": memory, "attention": options.attention}
    return setting + "".join(f" {name}={value}" for name, value in more.items() if value)


def run(
    peer: str, options: argparse.Namespace, config: Any, device: torch.device, rows: Rows
) -> None:
    """Build, pack, adapt and train one peer's model."""
    start, packer = time.perf_counter(), Packer(peer, config)
    model = build(config, device, packer.visit)
    synchronize(device)
    rows.add("building time", "s", time.perf_counter() - start)
    if peer == "ours":
        rows.add("experts before", "bytes", packer.before)
        rows.add("experts packed", "bytes", packer.after)
        rows.add("packed weight", "bytes/weight", 2 * packer.after / packer.before)
        moe_qlora.quantize_experts(model, quantization())  # takes on what is packed already
    else:
        model.set_experts_implementation("grouped_mm")
    if device.type == "cuda":
        rows.add("peak while building", "bytes", torch.cuda.max_memory_allocated(device))
    release(device)
    if device.type == "cuda":
        rows.add("model", "bytes", allocated(device))
    peft_model = adapt(peer, model, options)
    with prepared(peft_model, options, peer == "ours", rows):
        train(peft_model, options, device, rows)


def build(
    config: Any, device: torch.device, each: Callable[[str, nn.Module], None] | None = None
) -> Any:
    """The model in bf16 on the device, with its own random initialization.

    Memory is taken for one module at a time, so that `each`, called with every module's full name
    and the module once it has its own weights, can pack models that do not fit in 16 bit.
    """
    model = meta_model(config)
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in reversed(modules.items()):  # what a module holds comes before it
        owner = name
        while not isinstance(modules[owner], PreTrainedModel):
            owner = owner.rpartition(".")[0]
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():  # zeros: a class may leave out some in initializing
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.zero_()
        modules[owner]._init_weights(module)
        if each is not None:
            each(name, module)
    model.tie_weights()
    return model


class Packer:
    """Packs a model's expert stacks as they are made, and counts their bytes."""

    def __init__(self, peer: str, config: Any) -> None:
        self.before = self.after = 0
        self.stacks: dict[str, list[str]] = {}
        for param in moe_qlora.detect(meta_model(config)) if peer == "ours" else ():
            self.stacks.setdefault(param.module_name, []).append(param.parameter_name)

    def visit(self, name: str, module: nn.Module) -> None:
        """Pack this module's expert stacks."""
        for parameter in self.stacks.get(name, ()):
            weight = module.get_parameter(parameter).data
            packed = codec.pack(weight, CodecSettings.from_config(quantization()))
            self.before += weight.nbytes
            self.after += packed.nbytes
            parametrize.attach(module, parameter, packed)


def adapt(peer: str, model: Any, options: argparse.Namespace) -> Any:
    """LoRA as the peer has it, under gradient checkpointing unless told otherwise."""
    if options.checkpointing:
        recompute(model)
    model.config.get_text_config().use_cache = False
    experts, get = [param.name for param in moe_qlora.detect(model)], peft.get_peft_model
    if peer == "ours":
        experts, get = moe_qlora.target_parameters(model), moe_qlora.get_peft_model
    wanted = ["attention"] if peer == "frozen" else options.lora
    config = lora_config(model, experts, wanted, options.rank)
    return get(model, config, autocast_adapter_dtype=False)


def lora_config(model: nn.Module, experts: list[str], wanted: list[str], rank: int) -> Any:
    """PEFT's config of LoRA on attention, on the named expert weights, or on both."""
    attention = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "attn" in name.rpartition(".")[0].lower()
    ]
    if "attention" in wanted and not attention:
        raise ValueError(f"{type(model).__name__}: no Linear layer within a module named *attn*")
    return peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=attention if "attention" in wanted else [],
        target_parameters=experts if "experts" in wanted else None,
        task_type="CAUSAL_LM",
    )


@contextmanager
def prepared(
    peft_model: Any, options: argparse.Namespace, ours: bool, rows: Rows
) -> Iterator[None]:
    """Liger, torch.compile, and for ours what this package adds, as far as it is asked for."""
    whole = ours and options.prepare is not None  # prepare_training does it all
    model = peft_model.get_base_model()
    if options.liger_loss and not whole:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger

        liger(model=model, swiglu=False, rope=False, rms_norm=False)
    if options.compile and not whole:
        for layer in model.base_model.layers:
            layer.compile()
    with ExitStack() as stack:
        fit = off = None
        if ours and options.offload:
            off = stack.enter_context(moe_qlora.offload_experts(peft_model))
        if whole:
            memory = None if options.prepare == DEVICE else options.prepare
            memory = int(memory) if memory and memory.isdigit() else memory
            done = stack.enter_context(
                moe_qlora.prepare_training(
                    peft_model, batch_size=options.micro_batch, seq_len=options.seq, memory=memory
                )
            )
            print(done, flush=True)
            fit = done.fit
        if fit is not None:
            rows.add("planned peak", "bytes", fit.peak)
            rows.add("memory to fit", "bytes", fit.memory)
            count = Counter(layer.activations for layer in fit.layers)
            for kind, metric in KINDS.items():
                rows.add(metric, "layers", count[kind])
        yield
        if off is not None:
            rows.add("experts in host memory", "bytes", off.host_nbytes)
            rows.add("copies to the device", "copies", off.copies)
        device = next(peft_model.parameters()).device
        if fit is not None and device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(device)
            rows.add("planned peak, error", "%", 100 * (fit.peak / measured - 1))


def train(model: Any, options: argparse.Namespace, device: torch.device, rows: Rows) -> None:
    """Train on random tokens; records time, tokens/s and memory."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows.add("trained weights", "weights", sum(parameter.numel() for parameter in parameters))
    optimizer = OPTIMIZERS[options.optimizer](parameters, lr=1e-4)
    # Liger's loss in chunks as large as prepare_training's
    chunks = {"chunk_mem_const": 8} if options.prepare is not None else {}
    release(device)
    if device.type == "cuda":
        rows.add("model and adapters", "bytes", allocated(device))
    seconds: list[float] = []
    losses: list[float] = []
    vocabulary = model.config.get_text_config().vocab_size
    for _ in range(options.warmup + options.steps):
        ids = torch.randint(vocabulary, (options.micro_batch, options.seq), device=device)
        synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, **chunks).loss
        loss.backward()
        if not losses:
            # A gets none while B is zero
            named = model.named_parameters()
            dead = [n for n, p in named if "lora_B" in n and (p.grad is None or not p.grad.any())]
            if dead:
                raise RuntimeError(f"{len(dead)} LoRA weights get no gradient, first {dead[0]}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    seconds = seconds[options.warmup :]
    rows.add("step", "s", *seconds)
    rows.add("throughput", "tokens/s", *(ids.numel() / step for step in seconds))
    rows.add("first loss", "nats", losses[0])
    rows.add("last loss", "nats", losses[-1])
    if device.type == "cuda":
        rows.add("peak in training", "bytes", torch.cuda.max_memory_allocated(device))
        rows.add("reserved in training", "bytes", torch.cuda.max_memory_reserved(device))
        rows.add("resident between steps", "bytes", allocated(device))


if __name__ == "__main__":
    main()
